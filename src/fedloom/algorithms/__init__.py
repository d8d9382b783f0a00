"""The methods: one file per paper; ``REGISTRY`` has every name."""

from fedloom.algorithms._base import (
    Algorithm,
    Delta,
    Kept,
    Kind,
    Mean,
    Model,
    Rows,
    Sent,
    check_declaration,
    encodings,
    primary_field,
    upload_fields,
    upload_type,
)
from fedloom.algorithms._regulariser import Regulariser
from fedloom.algorithms.admmlpproj import ADMMLpProj
from fedloom.algorithms.afl import AFL
from fedloom.algorithms.apfl import APFL
from fedloom.algorithms.ditto import Ditto
from fedloom.algorithms.fedacs import FedACS
from fedloom.algorithms.fedadmm import FedADMM
from fedloom.algorithms.fedadmm_composite import FedADMMComposite
from fedloom.algorithms.fedadmm_inexact import FedADMMInexact
from fedloom.algorithms.fedamp import FedAMP
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedbn import FedBN
from fedloom.algorithms.feddr import FedDR
from fedloom.algorithms.feddualavg import FedDualAvg
from fedloom.algorithms.feddyn import FedDyn
from fedloom.algorithms.fedmid import FedMiD
from fedloom.algorithms.fednova import FedNova
from fedloom.algorithms.fedopt import FedOpt
from fedloom.algorithms.fedpd import FedPD
from fedloom.algorithms.fedper import FedPer
from fedloom.algorithms.fedprox import FedProx
from fedloom.algorithms.fedrep import FedRep
from fedloom.algorithms.fedskip import FedSkip
from fedloom.algorithms.fedslr import FedSLR
from fedloom.algorithms.fedspa import FedSpa
from fedloom.algorithms.fedsplit import FedSplit
from fedloom.algorithms.fiaelt import FIAELT
from fedloom.algorithms.flame import FLAME
from fedloom.algorithms.gifair import GIFAIR
from fedloom.algorithms.heurfedamp import HeurFedAMP
from fedloom.algorithms.lgfedavg import LGFedAvg
from fedloom.algorithms.local_only import Local
from fedloom.algorithms.lpgd import LPGD
from fedloom.algorithms.lpproj import LpProj
from fedloom.algorithms.perfedavg import PerFedAvg
from fedloom.algorithms.pfedme import PFedMe
from fedloom.algorithms.presets import PRESETS, Composition, Preset
from fedloom.algorithms.qffl import QFFL
from fedloom.algorithms.scaffold import SCAFFOLD

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "local": Local,
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
}

REGISTRY: dict[str, type[Algorithm] | Preset] = {**ALGORITHMS, **PRESETS}
"""Every method by name: an algorithm, or a preset that names a composition."""

__all__ = [
    "AFL",
    "ALGORITHMS",
    "APFL",
    "FIAELT",
    "FLAME",
    "GIFAIR",
    "LPGD",
    "PRESETS",
    "QFFL",
    "REGISTRY",
    "SCAFFOLD",
    "ADMMLpProj",
    "Algorithm",
    "Composition",
    "Delta",
    "Ditto",
    "FedACS",
    "FedADMM",
    "FedADMMComposite",
    "FedADMMInexact",
    "FedAMP",
    "FedAvg",
    "FedBN",
    "FedDR",
    "FedDualAvg",
    "FedDyn",
    "FedMiD",
    "FedNova",
    "FedOpt",
    "FedPD",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSLR",
    "FedSkip",
    "FedSpa",
    "FedSplit",
    "HeurFedAMP",
    "Kept",
    "Kind",
    "LGFedAvg",
    "Local",
    "LpProj",
    "Mean",
    "Model",
    "PFedMe",
    "PerFedAvg",
    "Preset",
    "Regulariser",
    "Rows",
    "Sent",
    "check_declaration",
    "encodings",
    "primary_field",
    "upload_fields",
    "upload_type",
]
