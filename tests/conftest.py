"""One thread per process, as in simulation; the same hypothesis examples on every CI run."""

from __future__ import annotations

import os
import tempfile

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)
_CACHE = tempfile.TemporaryDirectory(prefix="fedloom-cache-")
os.environ["FEDLOOM_CACHE"] = _CACHE.name

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.register_profile(
    "mutants",
    settings.get_profile("ci"),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
