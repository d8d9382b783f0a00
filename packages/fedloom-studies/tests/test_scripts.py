"""Scripts of the studies, which no package imports, use names that exist."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = sorted(
    path
    for path in (Path(__file__).parents[3] / "studies" / "scripts").iterdir()
    if path.is_file() and b"python" in path.read_bytes().split(b"\n", 1)[0]
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_what_exists(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedloom"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                is_module = hasattr(module, "__path__") and find_spec(f"{node.module}.{alias.name}")
                assert is_module or hasattr(module, alias.name), f"{node.module} has no {alias.name}"
