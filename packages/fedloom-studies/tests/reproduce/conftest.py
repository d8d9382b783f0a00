"""Puts the small recipe of this folder on the path; reports of its run directories are left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@contextmanager
def without_reports() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.lab.report.write_report", lambda runs, out, **_: out)
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_reports() -> Iterator[None]:
    with without_reports():
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories and the summary of FLAME in the small recipe."""
    from small_recipe import tiny

    from fedloom_studies.reproduce import reproduce

    out = tmp_path_factory.mktemp("figures")
    with without_reports():
        reproduce(tiny(), "full", out, results=out / "results", only=["flame"], seeds=[3, 4])
    return out
