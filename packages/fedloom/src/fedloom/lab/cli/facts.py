"""Commands that look up information: ``fedloom list``, ``describe``, ``schema`` and ``data``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from shutil import get_terminal_size
from textwrap import wrap
from typing import Annotated, Any

import typer

from fedloom.errors import ConfigError
from fedloom.hints import unknown_name_error
from fedloom.lab.cli import _complete as offer
from fedloom.lab.cli._app import AsJson, DataDir, app, print_errors, say, say_json

LISTS_ENTRY_POINTS = entry_points(group="fedloom.lists")
"""Kinds of parts that other packages add to ``fedloom list``. Each entry point is a function that returns names with
one-line descriptions."""
LISTED_KINDS = (
    "methods", "partitions", "models", "data", "samplers", "weighers", "mixers", "aggregators", "attacks", "channels",
    "devices", "schedules", "analyses", "metrics", *LISTS_ENTRY_POINTS.names,
)  # fmt: skip
"""Kinds of parts that ``fedloom list`` accepts."""
MIN_NAME_WIDTH = 22
"""Minimum width, in characters, of the column that contains names."""


@app.command(name="list", rich_help_panel="Start")
def list_command(
    what: Annotated[
        str,
        typer.Argument(help=f"one of {', '.join(LISTED_KINDS)}", autocompletion=offer.complete_one_of(*LISTED_KINDS)),
    ] = "methods",
    as_json: AsJson = False,
) -> None:
    """List all methods, or all parts of another kind.

    Example: fedloom list partitions
    """
    with print_errors():
        if what not in LISTED_KINDS:
            raise unknown_name_error("kind of part", what, LISTED_KINDS, "fedloom list")
        families: dict[str, list[tuple[str, str]]]
        if what in LISTS_ENTRY_POINTS.names:
            families = {"": LISTS_ENTRY_POINTS[what].load()()}
        else:
            from fedloom.lab.experiment.index import read_index

            families = read_index().families if what == "methods" else {"": read_index().parts[what]}
        if as_json:
            listed = [(family, name, line) for family, parts in families.items() for name, line in parts]
            keys = ("family", "name", "about")
            say_json([{key: text for key, text in zip(keys, one, strict=True) if text} for one in listed])
            return
        for family, parts in families.items():
            say(*([family] if family else []))
            _print(parts)


def _print(lines: list[tuple[str, str]]) -> None:
    width = get_terminal_size().columns if sys.stdout.isatty() else None
    for line in format_columns(lines, width):
        say(line)


def format_columns(lines: list[tuple[str, str]], width: int | None) -> Iterator[str]:
    """Yield lines with names and descriptions, side by side.

    On a narrow terminal, each description is printed below its name.

    If ``width`` is None, lines are not wrapped.

    >>> [*format_columns([("fedavg", "average of models.")], 18)]
    ['  fedavg', '    average of', '    models.']
    """
    indent = 2 + max(MIN_NAME_WIDTH, 2 + max(len(name) for name, _ in lines))
    for name, line in lines:
        if width is None or indent + len(line) <= width:
            yield f"  {name}".ljust(indent) + line
        elif width - indent >= MIN_NAME_WIDTH:
            first, *rest = wrap(line, width - indent)
            yield f"  {name}".ljust(indent) + first
            yield from (" " * indent + text for text in rest)
        else:
            yield f"  {name}"
            yield from wrap(line, width, initial_indent="    ", subsequent_indent="    ")


@app.command(rich_help_panel="Start")
def describe(
    name: Annotated[
        str, typer.Argument(help="a method, from 'fedloom list'", show_default=False, autocompletion=offer.algorithms)
    ],
    as_json: AsJson = False,
) -> None:
    """Print a method's reference card and its options.

    The card describes the problem, the reference, the notation, the communication, deviations from the paper, and when
    to use the method.

    Example: fedloom describe flame
    """
    with print_errors():
        from fedloom.imports import is_path

        if is_path(name):
            from fedloom.lab.experiment.cards import method_card
            from fedloom.trust import vouch_for_paths

            vouch_for_paths([name])
            text = method_card(name)
        else:
            from fedloom.lab.experiment.index import read_index
            from fedloom.values import choose

            index = read_index()
            kinds = [kind for kind, parts in index.parts.items() if name in dict(parts)]
            if name not in index.cards and kinds:
                fix = f"list the {kinds[0]} and their descriptions: fedloom list {kinds[0]}"
                raise ConfigError(f"{name!r} is not a method, but is listed under {' and '.join(kinds)}", fix=fix)
            text = choose("algorithm", index.cards, name)
        if as_json:
            say_json({"name": name, "card": text, "options": _make_option_schema(name)})
        else:
            say(text)


def _make_option_schema(name: str) -> dict[str, Any]:
    """Return a JSON schema of the options that a method defines, with the type, default, range and meaning of each.

    For a method given as an import path, the schema is empty.
    """
    from fedloom.lab.experiment.index import read_index

    choices = json.loads(read_index().schema)["properties"]["method"]["items"]["anyOf"]
    options = [one["properties"] for one in choices if one["properties"].get("algorithm", {}).get("const") == name]
    shared = set.intersection(*(set(one["properties"]) for one in choices if "const" in one["properties"]["algorithm"]))
    return {key: option for one in options[:1] for key, option in one.items() if key not in shared}


@app.command(rich_help_panel="Start")
def schema() -> None:
    """Print the JSON schema of experiment files.

    Editors use the schema for completion and validation.

    Example: fedloom schema > fedloom.schema.json
    """
    from fedloom.lab.experiment.index import read_index

    say(read_index().schema)


@app.command(rich_help_panel="Start")
def data(
    name: Annotated[
        str, typer.Argument(help="name of a data set, or a path", show_default=False, autocompletion=offer.sources)
    ],
    data_dir: DataDir = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="first download the original files and verify their digests (extra: fetch)")
    ] = False,
) -> None:
    """Summarize a data set: counts, shapes, classes and checksum.

    Example: fedloom data mnist --data-dir ~/data --fetch
    """
    with print_errors():
        from fedloom.data import load

        if fetch:
            from fedloom.data.sources.fetch import fetch as fetched

            say(f"files      {fetched(name, data_dir)}")
        facts: dict[str, Any] = load(name, data_dir).describe()
        for key, value in facts.items():
            say(f"{key:<10} {json.dumps(value) if isinstance(value, dict) else value}")
