"""Keep cards, names and the JSON schema in the user's cache, so that `list`, `describe` and `schema` need no torch.

What is kept holds for the very sources that it was made of.
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
    """The texts that commands print.

    Attributes:
        families: methods by family: (name, first line of the card).
        parts: the other parts by kind: (name, one line).
        cards: the card of every method, by name.
        schema: the JSON schema of experiment files.
    """

    families: dict[str, list[tuple[str, str]]]
    parts: dict[str, list[tuple[str, str]]]
    cards: dict[str, str]
    schema: str


def index() -> Index:
    """Return the cached index. Build it if it is missing or of other sources."""
    text = cache.find(INDEX_FILE, _sources())
    return _make() if text is None else Index(**json.loads(text))


def _make() -> Index:
    from fedloom.lab.experiment.cards import PART_KINDS, cards, families, parts
    from fedloom.lab.experiment.editors import json_schema

    texts = Index(families(), {what: parts(what) for what in (*PART_KINDS, "metrics")}, cards(), json_schema())
    cache.keep(INDEX_FILE, _sources(), json.dumps(texts._asdict()))
    return texts


def _sources() -> str:
    """Digest the files of the package, the versions behind them, and the analyses of other packages."""
    added = "".join(f"{name}{place}" for name, place in ANALYSES.places.items())
    return cache.fingerprint([Path(__file__).parents[2]]) + hashlib.sha256(added.encode()).hexdigest()[:16]
