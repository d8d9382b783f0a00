"""The index: cards, the JSON schema and the shapes of all tables, made of the classes once and kept.

With it a command answers, or refuses a file, without torch. It holds for the very sources that it was made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom import cache
from fedloom.errors import ConfigError
from fedloom.experiment.check import Grammar, Table, check
from fedloom.experiment.overrides import changed
from fedloom.experiment.shapes import Shape, plain
from fedloom.trust import check_document
from fedloom.values import read_toml, table

if TYPE_CHECKING:
    from fedloom.experiment.schema import Experiment

NAME = "index.json"


class Index(NamedTuple):
    """What is known of the classes.

    Attributes:
        families: methods by family: (name, first line of the card).
        cards: of every method.
        schema: the JSON schema of experiment files.
        grammar: what an experiment file may hold, with shapes as plain data.
    """

    families: dict[str, list[tuple[str, str]]]
    cards: dict[str, str]
    schema: str
    grammar: Grammar


def index() -> Index:
    """The index that is kept; where there is none, or one of other sources, it is made."""
    return _find() or _make()


def _find() -> Index | None:
    text = cache.find(NAME, _sources())
    if text is None:
        return None
    found = json.loads(text)
    head, tables, *rest = found.pop("grammar")
    grammar = Grammar(head, {name: Table(*of) for name, of in tables.items()}, *rest)
    return Index(**found, grammar=grammar)


def _make() -> Index:
    from fedloom.experiment.cards import cards, families
    from fedloom.experiment.editors import json_schema
    from fedloom.experiment.schema import GRAMMAR

    made = Index(families(), cards(), json_schema(), GRAMMAR.map(plain))
    cache.keep(NAME, _sources(), json.dumps(made._asdict()))
    return made


def _sources() -> str:
    """A digest of what the index is made of: the files of the package, and the versions behind them."""
    digest = hashlib.blake2b(digest_size=16)
    package = Path(__file__).parents[1]
    for folder, folders, files in os.walk(package):
        folders.sort()
        for name in sorted(f for f in files if f.endswith(".py")):
            found = os.stat(os.path.join(folder, name))
            digest.update(f"{folder}/{name} {found.st_size} {found.st_mtime_ns}\n".encode())
    for library in ("pydantic", "pydantic_core", "torch"):
        digest.update(f"{library} {version(library)}\n".encode())
    digest.update(sys.version.encode())
    return digest.hexdigest()


def read(
    path: Path,
    values: Sequence[str] = (),
    methods: Sequence[str] = (),
    rounds: int | None = None,
    *,
    trust: bool = False,
    **engine: Any,
) -> Experiment:
    """The experiment of a TOML file, with the changes of `fedloom.experiment.overrides.changed`.

    Args:
        path: the file; that of a run directory too, whose table ``resolved`` says with what it was made.
        values: other values, as ``local.lr=0.1``.
        methods: the methods that stay; all when empty.
        rounds: of every method.
        trust: run the code that it names by import path, though it is another user's.
        engine: replaces keys of its [engine], where it is not None.

    Raises:
        ConfigError: the file is missing, not TOML, says what cannot be, or is another user's and names code.
    """
    given = {key: value for key, value in read_toml(path, "experiment file").items() if key != "resolved"}
    check_document(given, path, trust=trust)
    document = changed(given, str(path), values, methods, rounds)
    chosen = {k: v for k, v in engine.items() if v is not None}
    if chosen:
        document["engine"] = {**table(document.get("engine", {}), f"{path}: [engine]"), **chosen}
    refuse(document, str(path))
    from fedloom.experiment.schema import parse

    return parse(document, str(path))


def refuse(document: Mapping[str, Any], where: str) -> None:
    """Refuse a document by the index, as `fedloom.experiment.parse` does by the classes, before torch is imported.

    Where there is no index, a refusal makes one; where torch is there already, all is left to `parse`.

    Args:
        document: of an experiment file.
        where: the file, for messages.

    Raises:
        ConfigError: see `fedloom.experiment.check.check`.
    """
    if "torch" in sys.modules:
        return
    found = _find()
    if found is not None:
        check(document, found.grammar, Shape, where)
        return
    from fedloom.experiment.schema import GRAMMAR

    try:
        check(document, GRAMMAR, Shape.of, where)
    except ConfigError:
        _make()
        raise
