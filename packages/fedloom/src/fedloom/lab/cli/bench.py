"""The command ``fedloom bench``."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.formats import format_duration, format_fixed, format_significant
from fedloom.lab.cli import _complete as offer
from fedloom.lab.cli._app import AsJson, DataDir, FileArgument, Trust, app, print_errors, say, say_json, worker_count

if TYPE_CHECKING:
    from fedloom.lab.experiment import Experiment
    from fedloom.lab.experiment.measure.bench import MeasuredSpeed
    from fedloom.processes.costs import ClusterShape, MethodCosts, RoundTimeParts


@app.command(rich_help_panel="Run")
def bench(
    file: FileArgument,
    workers: Annotated[
        list[str] | None,
        typer.Option(help="number of processes to measure, or 'auto'. May be repeated (default: 1 and all cores)"),
    ] = None,
    gradient_engine: Annotated[
        list[str] | None,
        typer.Option(
            help="how gradients are computed: compiled, vmap or loop. May be repeated (default: all)",
            autocompletion=offer.complete_one_of("compiled", "vmap", "loop"),
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="number of rounds to measure after one unmeasured round")] = 5,
    patience: Annotated[
        float,
        typer.Option(min=0, help="maximum number of seconds per table row to wait for the machine to become idle"),
    ] = 0,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="predict round times for this number of ranks per machine instead of measuring them (may be repeated)",
        ),
    ] = None,
    machines: Annotated[int | None, typer.Option(min=1, help="with --ranks: number of machines (default: 1)")] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="with --ranks: bandwidth of a machine's link in megabits per second (default: 1000)"
        ),
    ] = None,
    trip: Annotated[
        float | None, typer.Option(min=0, help="with --ranks: round-trip time in milliseconds (default: 1)")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="with --ranks: number of clients (default: as in the file)")
    ] = None,
    cohort: Annotated[
        int | None, typer.Option(min=1, help="with --ranks: number of clients per round (default: as in the file)")
    ] = None,
    per_gradient: Annotated[
        bool,
        typer.Option(
            "--per-gradient",
            help="instead, measure each method's processor time per gradient, relative to FedAvg",
        ),
    ] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Measure how fast an experiment runs on this machine.

    The command also estimates the time for the whole experiment, and writes no files. The reported time is the median
    number of seconds per round, excluding the first round and evaluation. A row is marked as unreliable if other
    processes used more than a tenth of a core during the measurement. With --ranks, the round time on several machines
    like this one is predicted from measurements of one process, for example with --ranks 8 --machines 4 --rate 1000
    --trip 50. With --per-gradient, methods are compared with FedAvg, and their time is split into client time and
    server time.

    Example: fedloom bench examples/quickstart.toml --workers 1 --workers 2 --rounds 5
    """
    with print_errors():
        counts = [worker_count(text) for text in workers or ()]
        from fedloom.errors import ConfigError
        from fedloom.lab.experiment import read
        from fedloom.lab.experiment.measure.bench import Bench
        from fedloom.lab.printing import print_rows
        from fedloom.processes.costs import ClusterShape, MachineLink

        for option, number in (("--patience", patience), ("--rate", rate), ("--trip", trip)):
            if number is not None and not isfinite(number):
                raise ConfigError(f"{option} must be a finite number, got {number}")
        elsewhere = {"--machines": machines, "--rate": rate, "--trip": trip, "--clients": clients, "--cohort": cohort}
        if per_gradient:
            only_rates = {**elsewhere, "--ranks": ranks, "--workers": workers, "--gradient-engine": gradient_engine}
            if ignored := [name for name, value in only_rates.items() if value is not None]:
                raise ConfigError(f"{' and '.join(ignored)} cannot be used with --per-gradient")
            rows = [*_per_gradient_rows(read(file, trust=trust), data_dir, rounds)]
            say_json({"methods": rows}) if as_json else print_rows(rows)
            return
        unread: dict[str, Any] = {"--workers": workers, "--gradient-engine": gradient_engine} if ranks else elsewhere
        if wrong := [name for name, value in unread.items() if value is not None]:
            raise ConfigError(
                f"{' and '.join(wrong)} {'cannot be used with' if ranks else 'can be used only with'} --ranks"
            )
        plan = Bench(read(file, trust=trust), data_dir, rounds=rounds, oracles=gradient_engine or (), workers=counts)
        if ranks:
            link = MachineLink((rate or 1000) * 1e6 / 8, (1 if trip is None else trip) / 1e3)
            places = [ClusterShape(r, machines or 1, link) for r in ranks]
            rows = []
            for method in plan.experiment.methods:
                costs = plan.costs(method)
                say(f"{method.label}: {_costs_text(costs)}", err=True)
                n, m = clients or plan.federation.n, cohort or costs.cohort
                rows += [{"method": method.label} | _calculated_row(p, costs.round(max(n, m), m, p)) for p in places]
            say_json({"rounds": rows}) if as_json else print_rows(rows)
            return
        speeds: list[MeasuredSpeed] = []
        total = sum(map(len, plan.ways.values()))
        for speed in plan.measure(patience):
            speeds.append(speed)
            way = speed.way
            say(f"{len(speeds)}/{total}: {speed.method}, {way.oracle}, workers {way.workers}", err=True)
        if as_json:
            say_json({"rounds": [_speed_row(speed) for speed in speeds], "minutes": plan.minutes(speeds)})
            return
        print_rows([_speed_row(speed) for speed in speeds], ("method", "gradient_engine", "workers"))
        runs = len(plan.experiment.methods) * len(plan.experiment.head.seeds)
        beside = f", {plan.share.runs} at a time" if plan.share.runs > 1 else ""
        say(f"the whole experiment, {runs} runs{beside}, without evaluation: {format_duration(plan.minutes(speeds))}")


def _per_gradient_rows(experiment: Experiment, data_dir: Path | None, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each method with its processor time per gradient, relative to FedAvg."""
    from fedloom.lab.experiment.measure.per_gradient import measure_per_gradient

    fed = experiment.partition(experiment.source.read(data_dir), experiment.head.seeds[0])
    fedavg = experiment.common.with_(algorithm="fedavg")
    settings = [(method.label, method.setting) for method in experiment.methods]
    for cost in measure_per_gradient(settings, fed, fedavg, rounds):
        yield {
            "method": cost.method,
            "gradient_engine": cost.oracle,
            "relative to fedavg": cost.ratio,
            "at clients": cost.clients,
            "at server": cost.server,
            "forward/gradient": cost.forward,
            "microseconds/gradient": 1e6 * cost.seconds,
            **({"note": cost.reason} if cost.reason else {}),
        }


def _speed_row(speed: MeasuredSpeed) -> dict[str, Any]:
    return {
        "method": speed.method,
        "gradient_engine": speed.way.oracle,
        "workers": speed.way.workers,
        "picked": "yes" if speed.way.is_chosen else "",
        "s/round": speed.seconds,
        "samples/s": round(speed.samples),
        "busy cores": f"{format_fixed(speed.other_cores, 2)}{' (unreliable)' if speed.is_disturbed else ''}",
    }


def _costs_text(costs: MethodCosts) -> str:
    return (
        f"{format_significant(1e3 * costs.share, 3)} ms per client of the cohort, {format_fixed(costs.crowd, 2)} times "
        f"as much if all {costs.cores} cores compute, {format_significant(1e3 * costs.result, 3)} ms and "
        f"{format_significant(costs.message / 1e6, 3)} MB per chunk of up to {costs.chunk} clients, "
        f"{format_significant(1e9 * costs.client, 3)} ns per client of the federation, "
        f"{format_significant(1e3 * costs.fixed, 3)} ms fixed, {format_significant(costs.row / 1e6, 3)} MB stored "
        "per client"
    )


def _calculated_row(place: ClusterShape, parts: RoundTimeParts) -> dict[str, Any]:
    return {
        "ranks": f"{place.machines} x {place.ranks}",
        "s/round": parts.seconds,
        "local work": parts.work,
        "results": parts.results,
        "link": parts.link,
        "all clients": parts.clients,
        "fixed": parts.fixed,
        "MB received": parts.bytes / 1e6,
        "ranks without work": parts.idle,
    }
