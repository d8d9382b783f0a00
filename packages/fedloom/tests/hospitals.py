"""The five hospitals of `examples/five_hospitals.py`: this module is that one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PLACE = Path(__file__).parents[3] / "examples" / "five_hospitals.py"
_SPEC = importlib.util.spec_from_file_location(__name__, _PLACE)
assert _SPEC is not None
assert _SPEC.loader is not None
sys.modules[__name__] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules[__name__])
