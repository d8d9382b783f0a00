"""What mkdocs calls while it builds: the pages that are made from the code and from recorded results."""

from __future__ import annotations

import re
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


def on_page_content(html: str, **more: object) -> str:
    """Tables scroll by the keyboard too, and a head without a word is a cell."""
    html = html.replace("<th></th>", "<td></td>")
    html = html.replace("<table>", '<div class="scrolls" tabindex="0" role="region" aria-label="Table"><table>')
    return html.replace("</table>", "</table></div>")


def on_post_page(output: str, **more: object) -> str:
    """What the theme leaves without a name for screen readers."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    return re.sub(r'<nav class="md-nav" data-md-level="[1-9]"', r'\g<0> role="group"', output)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made."""
    for path, content in pages():
        files.append(File.generated(config, path, content=content))
    return files
