"""Recorded runs that several test modules read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from recorded import Recording


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six methods, three seeds; scaffold-free, one method diverged with the last seed."""
    recording = Recording(rounds=20, extras=True, diverged="fedprox")
    return recording.write(tmp_path_factory.mktemp("runs") / "small")
