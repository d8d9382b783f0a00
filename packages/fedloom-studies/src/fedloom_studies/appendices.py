"""Writing of a generated page and its appendices, with adjusted links between them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fedloom.outputs import FileKind, check_output_file
from fedloom.storage import make_folder, write_atomic

PAGE_STARTS = (b"#", b"<", b"-")
"""Possible first bytes of a Markdown page that these commands write: a heading, a tag, or front matter."""
DOCS_FOLDER, PAGES_FOLDER = Path("docs"), Path("studies") / "pages"
"""Folders for pages and for their appendices in a checkout of the repository."""


def write_pages(page: Path, folder: str, contents: Iterable[tuple[str, str | bytes]]) -> None:
    """Write a page, and its appendices in a folder.

    The folder is next to the page, or in studies/pages if the page is in the docs of a checkout.

    Args:
        page: path of the page.
        folder: name of the folder for the appendices.
        contents: name and content of every file to write. The page itself has the name "". Links to appendices must
            start with ``folder/`` in the page, and links back must start with ``../`` in an appendix.

    Raises:
        ConfigError: a file exists that was not written by this command. Such a file is a page with a different first
            line, or a file in the folder if there is no page.
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
    """Raise an error, before any work is done, if a page must not be written.

    The first line of the existing page is compared later, when the new page is known.

    Raises:
        ConfigError: the page must not be written (see `fedloom.outputs.check_output_file`).
    """
    check_output_file(
        page,
        FileKind("Markdown", "a page that this command wrote", lambda path: _first_line(path)[:1] in PAGE_STARTS),
        force=None,
    )


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline().rstrip(b"\n")
