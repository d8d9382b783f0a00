"""``fedloom bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli import _complete as offer
from fedloom.cli._app import DataDir, FileArgument, app, errors

if TYPE_CHECKING:
    from fedloom.experiment.bench import Speed


@app.command()
def bench(
    file: FileArgument,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="processes to measure; may be repeated; 1 and all cores by default")
    ] = None,
    oracle: Annotated[
        list[str] | None,
        typer.Option(
            help="how gradients are computed: fused, stacked or looped; may be repeated; all by default",
            autocompletion=offer.one_of("fused", "stacked", "looped"),
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds to measure, of one more that is played")] = 5,
    patience: Annotated[float, typer.Option(min=0, help="seconds to wait for a quiet machine, per row")] = 0,
    data_dir: DataDir = None,
) -> None:
    """Measure how fast an experiment runs here, and estimate how long all of it takes; nothing is written.

    Seconds are the median per round, without the first and without evaluation. A row during which other processes
    used more than a tenth of a core is marked as unreliable.

    Example: fedloom bench examples/quickstart.toml --workers 1 --workers 2 --rounds 5
    """
    with errors():
        from fedloom.experiment import read
        from fedloom.experiment.bench import Bench, duration
        from fedloom.progress import print_rows

        plan = Bench(read(file), data_dir, rounds=rounds, oracles=oracle or (), workers=workers or ())
        found: list[Speed] = []
        total = sum(map(len, plan.ways.values()))
        for speed in plan.measure(patience):
            found.append(speed)
            way = speed.way
            typer.echo(f"{len(found)}/{total}: {speed.method}, {way.oracle}, workers {way.workers}", err=True)
        print_rows([_row(speed) for speed in found])
        runs = len(plan.experiment.methods) * len(plan.experiment.head.seeds)
        beside = f", {plan.processes} at a time" if plan.processes > 1 else ""
        typer.echo(f"the whole experiment, {runs} runs{beside}, without evaluation: {duration(plan.minutes(found))}")


def _row(speed: Speed) -> dict[str, Any]:
    return {
        "method": speed.method,
        "oracle": speed.way.oracle,
        "workers": speed.way.workers,
        "picked": "yes" if speed.way.picked else "",
        "s/round": speed.seconds,
        "samples/s": round(speed.samples),
        "busy cores": f"{speed.others:.2f}{' (unreliable)' if speed.disturbed else ''}",
    }
