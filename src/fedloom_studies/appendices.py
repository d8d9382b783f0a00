"""Write a generated page with its appendices, and the links between them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fedloom.storage import make_folder, write_atomic

DOCS, PAGES = Path("docs"), Path("studies") / "pages"
"""Folders of pages and of appendices in a checkout."""


def write_pages(page: Path, folder: str, contents: Iterable[tuple[str, str | bytes]]) -> None:
    """Write a page, and its appendices into a folder beside it; those of a checkout's docs go into studies/pages.

    Args:
        page: the file of the page.
        folder: name of the folder.
        contents: name and content of every file, the page's with an empty name. Links of the page lead to ``folder/``,
            those of an appendix to ``../``.
    """
    beside = page.resolve().parent
    in_checkout = beside == DOCS.resolve() and PAGES.is_dir()
    appendices = (PAGES.resolve() if in_checkout else beside) / folder
    make_folder(appendices)
    forth, back = os.path.relpath(appendices, beside), os.path.relpath(beside, appendices)
    for name, content in contents:
        if isinstance(content, str):
            link, place = ("../", back) if name else (f"{folder}/", forth)
            content = content.replace(f"]({link}", f"]({place}/").encode()
        write_atomic(appendices / name if name else page, content)
