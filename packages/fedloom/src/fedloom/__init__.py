"""fedloom: federated learning for heterogeneous clients.

Every public name is imported on first use, so ``import fedloom`` is fast and does not load torch.

>>> import fedloom as fl
>>> fl.seeds.derive(0, purpose="cohort") == fl.seeds.derive(0, purpose="cohort")
True
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError(
        "fedloom runs only on Linux and macOS. On Windows, install and run fedloom inside WSL (wsl --install)"
    )

from fedloom.lazy import lazy_names, make_dir, make_getattr
from fedloom.version import __version__

if TYPE_CHECKING:
    from fedloom import algorithms as algorithms
    from fedloom import analyses as analyses
    from fedloom import callbacks as callbacks
    from fedloom import data as data
    from fedloom import errors as errors
    from fedloom import models as models
    from fedloom import seeds as seeds
    from fedloom import sklearn as sklearn
    from fedloom import tasks as tasks
    from fedloom import testing as testing
    from fedloom.analyses.run import analyze as analyze
    from fedloom.choose import mixers as mixers
    from fedloom.choose import samplers as samplers
    from fedloom.choose import weighers as weighers
    from fedloom.data import partitions as partitions
    from fedloom.data.dataset import Dataset as Dataset
    from fedloom.data.federation import Federation as Federation
    from fedloom.data.sources import load as load
    from fedloom.data.sources.fetch import fetch as fetch
    from fedloom.engine.setting import Engine as Engine
    from fedloom.engine.setting import Evaluate as Evaluate
    from fedloom.engine.setting import Setting as Setting
    from fedloom.engine.simulate import simulate as simulate
    from fedloom.errors import FedloomError as FedloomError
    from fedloom.lab import experiment as experiment
    from fedloom.lab.advise.advise import advise as advise
    from fedloom.lab.comparison.compare import compare as compare
    from fedloom.lab.experiment import open_run as open_run
    from fedloom.local.settings import LocalSGD as LocalSGD
    from fedloom.rows import aggregators as aggregators
    from fedloom.rows import attacks as attacks
    from fedloom.rows import channels as channels
    from fedloom.rows import proxes as proxes
    from fedloom.trained.opened import open_model as open_model

_RENAMED_NAMES = {"aggregate": "aggregators", "channel": "channels", "partition": "partitions", "prox": "proxes"}
"""Old singular names of modules, mapped to their current plural names."""

__all__ = ["__version__", *lazy_names(__name__)]

__getattr__ = make_getattr(__name__, "methods are in fl.algorithms, models in fl.models", _RENAMED_NAMES)

__dir__ = make_dir(__name__)
