"""The built site, which several test modules read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import documents

sys.path.remove(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    code, said = documents.build(out)
    assert code == 0, said
    return out
