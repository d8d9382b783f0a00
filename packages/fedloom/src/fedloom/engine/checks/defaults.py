"""Adjustment of defaults that do not work with few clients.

The nearest valid value is used instead, and a note is added.
"""

from __future__ import annotations

from typing import TypeVar

from fedloom.engine.setting import Setting
from fedloom.schedule import OverSelection, Stream
from fedloom.values import Value, get_kind

V = TypeVar("V", bound=Value)


def adapt_defaults(setting: Setting, n: int) -> tuple[Setting, list[str]]:
    """Return the setting with defaults that work for ``n`` clients, and a note about each changed default.

    Options set by the user are not changed. Other checks reject impossible settings.

    Args:
        setting: setting of the run, with presets resolved.
        n: number of clients in the federation.
    """
    sampler, schedule = setting.sampler.adapted(n), setting.schedule.adapted(n)
    rows = sampler.smallest(n)
    if isinstance(schedule, Stream):
        rows = schedule.size
    elif isinstance(schedule, OverSelection) and rows is not None:
        rows = schedule.enough(rows)
    rule = setting.aggregator
    rule = rule if rule is None or rows is None else rule.adapted(rows)
    notes = [
        *_changed_default_notes("sampler", setting.sampler, sampler, f"{n} clients"),
        *_changed_default_notes("schedule", setting.schedule, schedule, f"{n} clients"),
        *_changed_default_notes("aggregator", setting.aggregator, rule, f"{rows} uploads"),
    ]
    if not notes:
        return setting, []
    return setting.with_(sampler=sampler, schedule=schedule, aggregator=rule), notes


def _changed_default_notes(table: str, old: Value | None, new: Value | None, among: str) -> list[str]:
    """Return a sentence for each changed field in a part of the setting."""
    if old is None or new is None:
        return []
    weak = ", so the rule tolerates no attacker"
    return [
        f"{table} {get_kind(new)!r}: {name} = {getattr(new, name)}, because {among} are too few for the default, "
        f"{getattr(old, name)}{weak if name in ('f', 'pre') else ''}"
        for name in type(old).model_fields
        if getattr(old, name) != getattr(new, name)
    ]
