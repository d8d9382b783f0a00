"""Cache of the rows of a listing in the user's cache folder, so that only changed rows are estimated again."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fedloom
from fedloom import cache

LISTED_FOLDERS = (Path(str(fedloom.__file__)).parent, Path(__file__).parent)
"""Code that makes a listing."""


def keep_listing(name: str, question: object, rows: Callable[[], Sequence[Any]], *places: Path | None) -> list[Any]:
    """Return the cached rows of a listing. If the code, files or the question differ, make and cache them again.

    Args:
        name: name of the listing.
        question: question that the rows answer. Its text is compared.
        rows: function that makes the rows, of values that JSON supports.
        places: files and folders that the rows depend on, besides the code and the data folder of the environment.
    """
    data = Path(folder).expanduser() if (folder := os.environ.get("FEDLOOM_DATA")) else None
    read = [place for place in (*LISTED_FOLDERS, data, *places) if place is not None]
    key = f"{question!r} {platform.node()} {[str(place) for place in read]} {cache.fingerprint(read)}"
    text = cache.find(f"{name}.json", key)
    if text is None:
        text = json.dumps(list(rows()))
        cache.keep(f"{name}.json", key, text)
    return list(json.loads(text))
