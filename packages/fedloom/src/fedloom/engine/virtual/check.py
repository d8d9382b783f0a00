"""Checks for settings that cannot be combined with a deadline, over-selection or an asynchronous schedule."""

from __future__ import annotations

from fedloom.algorithms import REGISTRY
from fedloom.engine.setting import Setting
from fedloom.errors import ConfigError, Refused
from fedloom.rows.attacks import Forgery
from fedloom.schedule import Deadline, OverSelection, Stream, Synchronous
from fedloom.values import get_kind


def check_schedule(setting: Setting, n: int) -> None:
    """Raise an error if a schedule is impossible or incompatible with the method or another part of the run.

    Raises:
        ConfigError: parts of the run are incompatible, or the schedule needs more clients than the run has. The message
            states the reason.
    """
    schedule, method = setting.schedule, setting.method
    if isinstance(schedule, Synchronous):
        return
    what, name = f"schedule {schedule.kind!r}", type(method).__name__
    if setting.devices is None:
        raise Refused(
            f"{what} requires simulated time, but the run has no devices",
            rule="schedule-needs-devices",
            fix="set {devices = 'lognormal'}",
        )
    fewest = setting.sampler.smallest(n)
    if isinstance(schedule, OverSelection) and setting.aggregator is not None and fewest is not None:
        setting.aggregator.check(schedule.enough(fewest))
    if isinstance(schedule, Deadline) and schedule.partial and not method.weighs_partial:
        able = ", ".join(sorted(k for k, entry in REGISTRY.items() if getattr(entry, "weighs_partial", False)))
        raise Refused(
            f"{what} with partial work cannot be used with {name}, which counts each client equally regardless of its "
            f"number of steps",
            rule="partial-work",
            fix=f"omit {{schedule.partial}}, or use one of {able}",
        )
    if isinstance(schedule, Deadline) and schedule.partial and method.full_gradients:
        raise Refused(
            f"{what} with partial work cannot be used with {method.full_gradients}, whose iterations are not steps of "
            "local SGD",
            rule="partial-full-gradients",
            fix="omit {schedule.partial}, or set {method.solver = 'sgd'}",
        )
    check_stream(setting, n)


def check_stream(setting: Setting, n: int | None) -> None:
    """Raise an error if a run does not support a buffered or asynchronous schedule, in virtual time or at real sites.

    Args:
        setting: the run's settings, with presets resolved.
        n: number of clients in the federation. None if it is not known yet.

    Raises:
        ConfigError: parts of the run are incompatible, or the schedule needs more clients than the run has. The message
            states the reason.
    """
    schedule, method, sampler = setting.schedule, setting.method, setting.sampler
    if not isinstance(schedule, Stream):
        return
    what, name = f"schedule {schedule.kind!r}", type(method).__name__
    if sampler.probes:
        raise Refused(
            f"{what} has no rounds, so sampler {sampler.kind!r} cannot query candidates before a round",
            rule="stream-asks-candidates",
            fix="omit {sampler}",
        )
    mixer = setting.personalized_aggregation
    among = getattr(method if mixer is None else mixer, "among", None)
    if among in ("cohort", "seen") or (method.mixes and not method.mixes_all):
        who = name if mixer is None else f"personalized_aggregation {mixer.kind!r}"
        owner = "method" if mixer is None else "personalized_aggregation"
        cure = "omit {schedule}" if among is None else f"set {{{owner}.among = 'all'}}"
        raise Refused(
            f"{what} cannot be used with {who}, which mixes the models of a round's clients, because clients train "
            f"one at a time with this schedule",
            rule="stream-mixes-a-round",
            fix=cure,
        )
    if isinstance(setting.attack, Forgery) and setting.attack.sees_honest:
        raise Refused(
            f"{what} has no rounds, so attack {get_kind(setting.attack)!r} cannot read a round's honest uploads",
            rule="stream-attack-on-a-round",
            fix="omit {attack} or {schedule}",
        )
    if setting.aggregator is not None:
        setting.aggregator.check(schedule.size)
    if n is None:
        return
    most = schedule.concurrency or sampler.smallest(n)
    if most is None:
        raise Refused(
            f"{what} trains a fixed number of clients at a time, but sampler {sampler.kind!r} draws varying numbers",
            rule="stream-concurrency",
            fix=f"set {{schedule.concurrency = {n}}}, or use a smaller number",
        )
    for key, number in (("concurrency", most), ("buffer", schedule.size)):
        if number > n:
            raise ConfigError(
                f"schedule.{key} must be at most the number of clients in the federation ({n}), got {number}",
                rule=f"schedule-{key}",
                fix=f"set {{schedule.{key} = {n}}}, or use a smaller number",
            )
