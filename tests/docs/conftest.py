"""The built site, which several test modules read."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import documents

sys.path.remove(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of a checkout in which one page has a dead link, the only warning of the build."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("packages", "studies", "tests", "mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        (root / name).symlink_to(documents.ROOT / name)
    shutil.copytree(documents.ROOT / "docs", root / "docs")
    with (root / "docs" / "start.md").open("a") as page:
        page.write("\n[a page that does not exist](nowhere.md)\n")
    out = root / "site"
    code, said = documents.build(out, root)
    assert code != 0
    assert "Aborted with 1 warnings in strict mode" in said, said
    return out
