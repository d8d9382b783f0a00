"""The methods. Each paper has its own file. ``REGISTRY`` maps every name to its method."""

from fedloom.algorithms._base import Algorithm as Algorithm
from fedloom.algorithms._messages import Delta as Delta
from fedloom.algorithms._messages import Kept as Kept
from fedloom.algorithms._messages import Kind as Kind
from fedloom.algorithms._messages import Mean as Mean
from fedloom.algorithms._messages import Model as Model
from fedloom.algorithms._messages import Point as Point
from fedloom.algorithms._messages import Rows as Rows
from fedloom.algorithms._messages import Sent as Sent
from fedloom.algorithms._messages import check_declaration as check_declaration
from fedloom.algorithms._messages import encodings as encodings
from fedloom.algorithms._messages import exact_fields as exact_fields
from fedloom.algorithms._messages import primary_field as primary_field
from fedloom.algorithms._messages import upload_fields as upload_fields
from fedloom.algorithms._messages import upload_type as upload_type
from fedloom.algorithms._regulariser import Regulariser as Regulariser
from fedloom.algorithms.admmlpproj import ADMMLpProj as ADMMLpProj
from fedloom.algorithms.afl import AFL as AFL
from fedloom.algorithms.analytic_fl import AnalyticFL as AnalyticFL
from fedloom.algorithms.apfl import APFL as APFL
from fedloom.algorithms.cfl import CFL as CFL
from fedloom.algorithms.dbe import DBE as DBE
from fedloom.algorithms.ditto import Ditto as Ditto
from fedloom.algorithms.fed3r import Fed3R as Fed3R
from fedloom.algorithms.fedacs import FedACS as FedACS
from fedloom.algorithms.fedadmm import FedADMM as FedADMM
from fedloom.algorithms.fedadmm_composite import FedADMMComposite as FedADMMComposite
from fedloom.algorithms.fedadmm_inexact import FedADMMInexact as FedADMMInexact
from fedloom.algorithms.fedala import FedALA as FedALA
from fedloom.algorithms.fedamp import FedAMP as FedAMP
from fedloom.algorithms.fedas import FedAS as FedAS
from fedloom.algorithms.fedavg import FedAvg as FedAvg
from fedloom.algorithms.fedavg_ft import FedAvgFT as FedAvgFT
from fedloom.algorithms.fedbabu import FedBABU as FedBABU
from fedloom.algorithms.fedbn import FedBN as FedBN
from fedloom.algorithms.feddr import FedDR as FedDR
from fedloom.algorithms.feddualavg import FedDualAvg as FedDualAvg
from fedloom.algorithms.feddyn import FedDyn as FedDyn
from fedloom.algorithms.fedem import FedEM as FedEM
from fedloom.algorithms.fedfomo import FedFomo as FedFomo
from fedloom.algorithms.fedhip import FedHiP as FedHiP
from fedloom.algorithms.fedmid import FedMiD as FedMiD
from fedloom.algorithms.fednova import FedNova as FedNova
from fedloom.algorithms.fedopt import FedOpt as FedOpt
from fedloom.algorithms.fedpac import FedPAC as FedPAC
from fedloom.algorithms.fedpd import FedPD as FedPD
from fedloom.algorithms.fedper import FedPer as FedPer
from fedloom.algorithms.fedproto import FedProto as FedProto
from fedloom.algorithms.fedprox import FedProx as FedProx
from fedloom.algorithms.fedrep import FedRep as FedRep
from fedloom.algorithms.fedrod import FedRoD as FedRoD
from fedloom.algorithms.fedskip import FedSkip as FedSkip
from fedloom.algorithms.fedslr import FedSLR as FedSLR
from fedloom.algorithms.fedspa import FedSpa as FedSpa
from fedloom.algorithms.fedsplit import FedSplit as FedSplit
from fedloom.algorithms.fiaelt import FIAELT as FIAELT
from fedloom.algorithms.flame import FLAME as FLAME
from fedloom.algorithms.gifair import GIFAIR as GIFAIR
from fedloom.algorithms.gpfl import GPFL as GPFL
from fedloom.algorithms.heurfedamp import HeurFedAMP as HeurFedAMP
from fedloom.algorithms.ifca import IFCA as IFCA
from fedloom.algorithms.knnper import KNNPer as KNNPer
from fedloom.algorithms.lgfedavg import LGFedAvg as LGFedAvg
from fedloom.algorithms.local_only import LocalOnly as LocalOnly
from fedloom.algorithms.lpgd import LPGD as LPGD
from fedloom.algorithms.lpproj import LpProj as LpProj
from fedloom.algorithms.moon import MOON as MOON
from fedloom.algorithms.perfedavg import PerFedAvg as PerFedAvg
from fedloom.algorithms.pfedfda import PFedFDA as PFedFDA
from fedloom.algorithms.pfedme import PFedMe as PFedMe
from fedloom.algorithms.presets import PRESETS as PRESETS
from fedloom.algorithms.presets import Preset as Preset
from fedloom.algorithms.presets import PresetMethod as PresetMethod
from fedloom.algorithms.qffl import QFFL as QFFL
from fedloom.algorithms.scaffold import SCAFFOLD as SCAFFOLD
from fedloom.lazy import make_dir

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "local": LocalOnly,
    "scaffold": SCAFFOLD,
    "feddyn": FedDyn,
    "fedpd": FedPD,
    "fedadmm": FedADMM,
    "fedadmm-inexact": FedADMMInexact,
    "fedadmm-composite": FedADMMComposite,
    "feddr": FedDR,
    "fedsplit": FedSplit,
    "fiaelt": FIAELT,
    "fedmid": FedMiD,
    "feddualavg": FedDualAvg,
    "fedskip": FedSkip,
    "fedslr": FedSLR,
    "lpgd": LPGD,
    "fedavg-ft": FedAvgFT,
    "ditto": Ditto,
    "flame": FLAME,
    "fedacs": FedACS,
    "pfedme": PFedMe,
    "perfedavg": PerFedAvg,
    "apfl": APFL,
    "fedamp": FedAMP,
    "heurfedamp": HeurFedAMP,
    "fedrep": FedRep,
    "fedper": FedPer,
    "fedbabu": FedBABU,
    "fedala": FedALA,
    "fedrod": FedRoD,
    "ifca": IFCA,
    "cfl": CFL,
    "fedem": FedEM,
    "moon": MOON,
    "fedproto": FedProto,
    "fedfomo": FedFomo,
    "fedpac": FedPAC,
    "dbe": DBE,
    "gpfl": GPFL,
    "knn-per": KNNPer,
    "fedas": FedAS,
    "pfedfda": PFedFDA,
    "lg-fedavg": LGFedAvg,
    "fedbn": FedBN,
    "fedspa": FedSpa,
    "lp-proj": LpProj,
    "admm-lp-proj": ADMMLpProj,
    "afl": AFL,
    "fednova": FedNova,
    "fedopt": FedOpt,
    "gifair-fl": GIFAIR,
    "q-ffl": QFFL,
    "analytic-fl": AnalyticFL,
    "fed3r": Fed3R,
    "fedhip": FedHiP,
}

REGISTRY: dict[str, type[Algorithm] | Preset] = {**ALGORITHMS, **PRESETS}
"""Every method, keyed by name. A method is either an algorithm, or a preset that combines an algorithm with other
components."""


def get_role(method: Algorithm | PresetMethod) -> str:
    """Return the role that a method plays as a baseline in a comparison, regardless of the name of the method.

    "alone": clients train separately and send nothing. "average": all clients use the single model that FedAvg trains.
    "pooled": all samples are in one place. For all other methods, the role is empty.
    """
    if isinstance(method, PresetMethod):
        return "pooled" if method.pooled else ""
    return ("average" if type(method) is FedAvg else "") if upload_fields(type(method)) else "alone"


__dir__ = make_dir(__name__)
