"""Cache for the rows of listings. The rows are re-estimated only after a change."""

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
"""Folders that contain the code that produces a listing."""


def read_listing(name: str, question: object, rows: Callable[[], Sequence[Any]], *places: Path | None) -> list[Any]:
    """Return the rows of a listing from the cache.

    The rows are computed and cached again after changes to the code, the files or the question.

    Args:
        name: name of the listing.
        question: question that the rows answer. It is compared with other questions as text.
        rows: function that computes the rows, which consist of JSON values.
        places: folders with records and data that affect the rows, in addition to the code and the data folder of the
            environment. Only files directly in a folder or in its subfolders matter, so a large folder is not walked.
    """
    data = Path(folder).expanduser() if (folder := os.environ.get("FEDLOOM_DATA")) else None
    read = [place for place in (data, *places) if place is not None]
    files = (file for place in read for pattern in ("*", "*/*") for file in sorted(place.glob(pattern)))
    state = cache.fingerprint_sources((*LISTED_FOLDERS, *(file for file in files if file.is_file())))
    key = f"{question!r} {platform.node()} {[str(place) for place in read]} {state}"
    text = cache.read_cached_text(f"{name}.json", key)
    if text is None:
        text = json.dumps(list(rows()))
        cache.write_cached_text(f"{name}.json", key, text)
    return list(json.loads(text))
