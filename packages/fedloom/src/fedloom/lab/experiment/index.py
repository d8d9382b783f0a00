"""Cache of cards, names and the JSON schema, so that `list`, `describe` and `schema` run without importing torch.

The cache is valid until the source files change.
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
    """Texts that `list`, `describe` and `schema` print.

    Attributes:
        families: methods of each family, as pairs (name, first line of the card).
        parts: all other parts, keyed by kind, as pairs (name, one-line description).
        cards: the card of every method, keyed by name.
        schema: the JSON schema of experiment files.
    """

    families: dict[str, list[tuple[str, str]]]
    parts: dict[str, list[tuple[str, str]]]
    cards: dict[str, str]
    schema: str


def read_index() -> Index:
    """Return the cached index.

    The index is rebuilt if it is missing, or if it was built from different source files.
    """
    text = cache.read_cached_text(INDEX_FILE, _digest_sources())
    return _build_index() if text is None else Index(**json.loads(text))


def _build_index() -> Index:
    from fedloom.lab.experiment.cards import PART_KINDS, all_method_cards, list_families, list_parts
    from fedloom.lab.experiment.editors import json_schema

    texts = Index(
        list_families(),
        {what: list_parts(what) for what in (*PART_KINDS, "metrics")},
        all_method_cards(),
        json_schema(),
    )
    cache.write_cached_text(INDEX_FILE, _digest_sources(), json.dumps(texts._asdict()))
    return texts


def _digest_sources() -> str:
    """Return a digest of the package's files, its dependencies' versions, and the analyses that other packages add."""
    added = "".join(f"{name}{place}" for name, place in ANALYSES.places.items())
    return cache.fingerprint_sources([Path(__file__).parents[2]]) + hashlib.sha256(added.encode()).hexdigest()[:16]
