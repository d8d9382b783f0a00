"""Reference cards: descriptions of every method and its options.

The module also lists every other kind of part that can be selected by name in an experiment.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from pydantic.fields import FieldInfo

from fedloom.algorithms import REGISTRY, Algorithm, Preset, PresetMethod
from fedloom.algorithms._theorems import THEOREM_TABLE
from fedloom.analyses import ANALYSES
from fedloom.choose import MIXERS, SAMPLERS, WEIGHERS, SharesWeigher
from fedloom.data.partitions import PARTITIONS
from fedloom.data.sources import SOURCES
from fedloom.engine.checks.refusals import check_mixer, check_together
from fedloom.errors import Refused
from fedloom.local import LocalSGD
from fedloom.metrics import METRICS
from fedloom.models import MODEL_CLASSES
from fedloom.options import get_limits
from fedloom.rows.aggregators import AGGREGATORS
from fedloom.rows.attacks import ATTACKS
from fedloom.rows.channels import CHANNELS
from fedloom.schedule import DEVICES, SCHEDULES
from fedloom.values import Value, choose, fields_of

PART_KINDS: Mapping[str, Mapping[str, type[Value]]] = {
    "partitions": PARTITIONS,
    "models": MODEL_CLASSES,
    "data": SOURCES,
    "samplers": SAMPLERS,
    "weighers": WEIGHERS,
    "mixers": MIXERS,
    "aggregators": AGGREGATORS,
    "attacks": ATTACKS,
    "channels": CHANNELS,
    "devices": DEVICES,
    "schedules": SCHEDULES,
    "analyses": ANALYSES,
}
"""Topics that ``fedloom list`` accepts in addition to methods, metrics and recipes."""

COUNTED_METHODS = tuple(name for name, entry in REGISTRY.items() if not (isinstance(entry, Preset) and entry.pooled))
"""Methods counted in the documentation: all methods except references that train on all clients' pooled data."""


def list_parts(what: str) -> list[tuple[str, str]]:
    """Return the names and one-line descriptions of all parts of a kind (a key of `PART_KINDS`, or "metrics")."""
    if what == "metrics":
        return [(n, f"{m.title}, {'higher' if m.higher_is_better else 'lower'} is better") for n, m in METRICS.items()]
    return [(name, (inspect.getdoc(kind) or "").partition("\n")[0]) for name, kind in PART_KINDS[what].items()]


def list_families() -> dict[str, list[tuple[str, str]]]:
    """Return the methods of each family, as pairs (name, first line of the card)."""
    families: dict[str, list[tuple[str, str]]] = {}
    for name, entry in REGISTRY.items():
        family = "preset" if isinstance(entry, Preset) else entry.family
        line = card_text(entry).splitlines()[0].partition(": ")[2]
        families.setdefault(family, []).append((name, line))
    return families


def card_text(entry: type[Algorithm] | Preset) -> str:
    """Return the descriptive text of a method's card."""
    if isinstance(entry, Preset):
        return inspect.cleandoc(entry.card)
    module = inspect.getmodule(entry)
    return inspect.cleandoc((module and module.__doc__) or entry.__doc__ or "")


def method_card(name: str) -> str:
    """Return the card of a method, with the defaults and ranges of its options.

    The name may also be the import path of a user's class.

    Raises:
        ConfigError: there is no method with this name. The message suggests the most similar existing name.
    """
    entry = choose("algorithm", REGISTRY, name, base=Algorithm)
    options = [_option_text(key, field) for key, field in fields_of(entry).items()]
    lines = [
        card_text(entry),
        *theory_lines(name),
        "",
        "Options:",
        *(options or ["    none"]),
        *_paper_constant_lines(entry),
    ]
    return "\n".join(lines)


THEOREM_EXAMPLES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sampler": ("rounds without all clients", {}),
    "schedule": ("a schedule other than 'synchronous'", {}),
    "aggregation_weights": ("aggregation weights other than 'shares'", {"weigher": WEIGHERS["samples"]()}),
    "personalized_aggregation": ("personalized aggregation", {}),
    "aggregator": ("an aggregator other than 'mean'", {"aggregator": AGGREGATORS["median"]()}),
    "upload_transform": ("an upload transform", {"channel": CHANNELS["top-k"]()}),
    "attack": ("attackers", {}),
}
"""Kinds of parts that a theorem may not cover, each with a description and an example for `check_together`."""


def theory_lines(name: str) -> list[str]:
    """Return lines that state what a method's paper proves, its conditions, and what the theorem does not cover.

    The list is empty if the paper has no theorem.
    """
    if name not in THEOREM_TABLE:
        return []
    theorem = THEOREM_TABLE[name]
    lost = [words for kind, (words, _) in THEOREM_EXAMPLES.items() if kind in uncovered_parts(name)]
    sentences = [f"Theory: {theorem.proves}.", f"It needs {theorem.needs}.", theorem.defaults]
    sentences += [f"The method also runs with {', '.join(lost[:-1])} or {lost[-1]}, which the theorem does not cover."]
    return ["", *wrap(" ".join(filter(None, sentences)), 120)]


def uncovered_parts(name: str) -> tuple[str, ...]:
    """Return the kinds of parts that a method accepts but its theorem does not cover."""
    algorithm = REGISTRY[name]()
    method = algorithm if isinstance(algorithm, PresetMethod) else PresetMethod(algorithm)

    def is_taken(kind: str) -> bool:
        if kind == "aggregation_weights" and method.weigher is not None:
            return False
        try:
            if kind == "personalized_aggregation":
                check_mixer(method.algorithm, MIXERS["attention"](), None)
            else:
                check_together(
                    method.algorithm, LocalSGD(), **{"weigher": SharesWeigher(), **THEOREM_EXAMPLES[kind][1]}
                )
        except Refused:
            return False
        return True

    return tuple(kind for kind in THEOREM_EXAMPLES if kind not in THEOREM_TABLE[name].covers and is_taken(kind))


def _paper_constant_lines(entry: type[Algorithm] | Preset) -> list[str]:
    """Return lines about the values for ``defaults = "paper"`` and ``"released"`` that differ from the defaults."""
    lines = []
    for word, constants in (("paper", entry.paper), ("released", entry.released)):
        if constants:
            lines += [
                "",
                f'With defaults = "{word}":',
                *(f"    {name} = {value!r}" for name, value in constants.items()),
            ]
    return lines


def all_method_cards() -> dict[str, str]:
    """Return the card of every registered method, keyed by name."""
    return {name: method_card(name) for name in REGISTRY}


def _option_text(name: str, field: FieldInfo) -> str:
    limits = get_limits(field)
    allowed = f" ({', '.join(limits)})" if limits else ""
    return f"    {name} = {field.default!r}{allowed}: {field.description}"
