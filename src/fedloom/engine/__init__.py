"""Runs: a setting, its rounds, their evaluation and the result.

Every name is imported when it is first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.lazy import getter

if TYPE_CHECKING:
    from fedloom.engine.setting import Setting as Setting
    from fedloom.engine.simulate import measure_rounds as measure_rounds
    from fedloom.engine.simulate import samples_per_round as samples_per_round

__all__ = ["Setting", "measure_rounds", "samples_per_round"]

__getattr__ = getter(
    __name__,
    {
        "Setting": "fedloom.engine.setting:Setting",
        "measure_rounds": "fedloom.engine.simulate:measure_rounds",
        "samples_per_round": "fedloom.engine.simulate:samples_per_round",
    },
)
