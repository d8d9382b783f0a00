"""Puts the small recipe of this folder on the path; reports of its run directories are left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="package", autouse=True)
def _no_reports() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.report.write", lambda runs, out, **_: out)
        yield


@pytest.fixture(scope="package")
def finished(_no_reports: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories and the summary of FLAME in the small recipe."""
    from small_recipe import tiny

    from fedloom.reproduce import reproduce

    out = tmp_path_factory.mktemp("figures")
    reproduce(tiny(), "full", out, results=out / "results", only=["flame"], seeds=[3, 4])
    return out
