"""What mkdocs calls while it builds: the pages that are made from the code and from recorded results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import choosing
import experiment_file
import methods
import notebooks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]


def pages() -> Iterator[tuple[str, str]]:
    """Path and content of every page that is made."""
    yield from methods.pages()
    yield "experiment-file.md", experiment_file.page()
    yield "choosing.md", choosing.page()
    yield from notebooks.pages()
    for name in ("CONTRIBUTING", "CHANGELOG"):
        yield f"{name.lower()}.md", (ROOT / f"{name}.md").read_text()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the place of the methods in the navigation."""
    for entry in config["nav"]:
        if entry.get("Methods") == "methods/":
            entry["Methods"] = methods.navigation()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made."""
    for path, content in pages():
        files.append(File.generated(config, path, content=content))
    return files
