"""Write a generated page with its appendices, and the links between them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fedloom.outputs import FileKind, check_output_file
from fedloom.storage import make_folder, write_atomic

PAGE_STARTS = (b"#", b"<", b"-")
"""First bytes of a Markdown page written by these commands, i.e. a heading, a tag, or front matter."""
DOCS_FOLDER, PAGES_FOLDER = Path("docs"), Path("studies") / "pages"
"""Folders for pages and for appendices in a checkout."""


def write_pages(page: Path, folder: str, contents: Iterable[tuple[str, str | bytes]]) -> None:
    """Write a page, and write its appendices to a folder next to it.

    The appendices of a page in a checkout's docs are written to studies/pages.

    Args:
        page: file of the page.
        folder: name of the folder.
        contents: name and content of every file. The page itself has an empty name. Links in the page start with
            ``folder/``, and links in an appendix start with ``../``.

    Raises:
        ConfigError: there is a file that this command did not write: a page with a different first line or, if there is
            no page, a file in the folder.
    """
    beside = page.resolve().parent
    in_checkout = beside == DOCS_FOLDER.resolve() and PAGES_FOLDER.is_dir()
    appendices = (PAGES_FOLDER.resolve() if in_checkout else beside) / folder
    check_page(page)
    forth, back = os.path.relpath(appendices, beside), os.path.relpath(beside, appendices)
    files = list[tuple[Path, bytes]]()
    for name, content in contents:
        if isinstance(content, str):
            link, place = ("../", back) if name else (f"{folder}/", forth)
            content = content.replace(f"]({link}", f"]({place}/").encode()
        files.append((appendices / name if name else page, content))
    first = {path: content.partition(b"\n")[0] for path, content in files}

    def is_own(path: Path) -> bool:
        return first[page] == _first_line(page) if path == page else in_checkout or page.exists()

    for path, _ in files:
        if path == page or path.exists():
            check_output_file(path, FileKind("Markdown", "a page that this command wrote", is_own), force=None)
    make_folder(appendices)
    for path, content in files:
        write_atomic(path, content)


def check_page(page: Path) -> None:
    """Raise an error before any work if a page must not be written.

    The page's first line is compared once the new page is known.

    Raises:
        ConfigError: see `fedloom.outputs.check_output_file`.
    """
    check_output_file(
        page,
        FileKind("Markdown", "a page that this command wrote", lambda path: _first_line(path)[:1] in PAGE_STARTS),
        force=None,
    )


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline().rstrip(b"\n")
