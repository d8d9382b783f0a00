"""Cache for the rows of listings. The rows are estimated again only if something has changed."""

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
"""Folders with the code that produces a listing."""


def keep_listing(name: str, question: object, rows: Callable[[], Sequence[Any]], *places: Path | None) -> list[Any]:
    """Return the rows of a listing from the cache.

    The rows are computed and cached again if the code, the files or the question have changed.

    Args:
        name: name of the listing, which is also the name of its cache file.
        question: options that determine the rows. It is compared as text.
        rows: function that computes the rows. They may contain only values that JSON supports.
        places: other files and folders that the rows depend on, besides the code and the folder FEDLOOM_DATA.
    """
    data = Path(folder).expanduser() if (folder := os.environ.get("FEDLOOM_DATA")) else None
    read = [place for place in (*LISTED_FOLDERS, data, *places) if place is not None]
    key = f"{question!r} {platform.node()} {[str(place) for place in read]} {cache.fingerprint(read)}"
    text = cache.find(f"{name}.json", key)
    if text is None:
        text = json.dumps(list(rows()))
        cache.keep(f"{name}.json", key, text)
    return list(json.loads(text))
