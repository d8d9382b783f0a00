"""Keep the rows of a listing in the user's cache, so that only what has changed is estimated anew."""

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
"""The code behind a listing."""


def keep_listing(name: str, question: object, rows: Callable[[], Sequence[Any]], *places: Path | None) -> list[Any]:
    """Return the rows that are kept of a listing, where code, files or the question differ, make and keep them.

    Args:
        name: of the listing.
        question: what was asked. Its text is compared.
        rows: makes the rows, of what JSON can hold.
        places: files and folders that the rows depend on, beside the code and the data folder of the environment.
    """
    data = Path(folder).expanduser() if (folder := os.environ.get("FEDLOOM_DATA")) else None
    read = [place for place in (*LISTED_FOLDERS, data, *places) if place is not None]
    key = f"{question!r} {platform.node()} {[str(place) for place in read]} {cache.fingerprint(read)}"
    text = cache.find(f"{name}.json", key)
    if text is None:
        text = json.dumps(list(rows()))
        cache.keep(f"{name}.json", key, text)
    return list(json.loads(text))
