"""Cache of cards, names and the JSON schema for users, so that `list`, `describe` and `schema` need no torch.

The cache is valid only for the sources from which it was made.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from fedloom import cache
from fedloom.analyses.registry import ANALYSES

INDEX_FILE = "index.json"


class Index(NamedTuple):
    """Texts that the commands print.

    Attributes:
        families: methods by family, each as (name, first line of the card).
        parts: other parts by kind, each as (name, one line).
        cards: the card of every method, by name.
        schema: the JSON schema of experiment files.
    """

    families: dict[str, list[tuple[str, str]]]
    parts: dict[str, list[tuple[str, str]]]
    cards: dict[str, str]
    schema: str


def index() -> Index:
    """Return the cached index. It is rebuilt if it is missing or was made from different sources."""
    text = cache.find(INDEX_FILE, _sources())
    return _make() if text is None else Index(**json.loads(text))


def _make() -> Index:
    from fedloom.lab.experiment.cards import PART_KINDS, cards, families, parts
    from fedloom.lab.experiment.editors import json_schema

    texts = Index(families(), {what: parts(what) for what in (*PART_KINDS, "metrics")}, cards(), json_schema())
    cache.keep(INDEX_FILE, _sources(), json.dumps(texts._asdict()))
    return texts


def _sources() -> str:
    """Return a digest of the package's files, the versions of its dependencies, and the analyses of other packages."""
    added = "".join(f"{name}{place}" for name, place in ANALYSES.places.items())
    return cache.fingerprint([Path(__file__).parents[2]]) + hashlib.sha256(added.encode()).hexdigest()[:16]
