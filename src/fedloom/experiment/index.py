"""Keep cards, names and the JSON schema in the user's cache, so that `list`, `describe` and `schema` need no torch.

What is kept holds for the very sources that it was made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from fedloom import cache

NAME = "index.json"


class Index(NamedTuple):
    """The texts that commands print.

    Attributes:
        families: methods by family: (name, first line of the card).
        cards: the card of every method, by name.
        schema: the JSON schema of experiment files.
    """

    families: dict[str, list[tuple[str, str]]]
    cards: dict[str, str]
    schema: str


def index() -> Index:
    """Return the index that is kept; where there is none, or one of other sources, make it."""
    text = cache.find(NAME, _sources())
    return _make() if text is None else Index(**json.loads(text))


def _make() -> Index:
    from fedloom.experiment.cards import cards, families
    from fedloom.experiment.editors import json_schema

    texts = Index(families(), cards(), json_schema())
    cache.keep(NAME, _sources(), json.dumps(texts._asdict()))
    return texts


def _sources() -> str:
    """Digest the files of the package, and the versions behind them."""
    digest = hashlib.blake2b(digest_size=16)
    package = Path(__file__).parents[1]
    for folder, folders, files in os.walk(package):
        folders.sort()
        for name in sorted(f for f in files if f.endswith(".py")):
            stat = os.stat(os.path.join(folder, name))
            digest.update(f"{folder}/{name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for library in ("pydantic", "pydantic_core", "torch"):
        digest.update(f"{library} {version(library)}\n".encode())
    digest.update(sys.version.encode())
    return digest.hexdigest()
