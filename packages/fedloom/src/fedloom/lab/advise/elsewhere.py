"""Laps on an executor: send each lap to a worker as text, together with its checkpoint, and receive the result."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedloom.data.federation import Federation
from fedloom.lab.advise.laps import LAP_FILE, cut_validation, lap_setting, run_lap
from fedloom.lab.experiment.file import parse
from fedloom.lab.experiment.units.travel import (
    UnitReply,
    read_document,
    read_federation,
    receive_data,
    unit_folder,
    worker_name,
)
from fedloom.storage.files import write_atomic


def pack_lap(
    seed: int, method: Mapping[str, Any], rounds: int, end: int, metric: str, seeds: Sequence[int], before: Path | None
) -> str:
    """Encode a lap of a race as text.

    Args:
        seed: seed of the run.
        method: table of the method in an experiment file.
        rounds: number of rounds in the full run.
        end: round at which the lap ends.
        metric: metric that compares the methods.
        seeds: all seeds of the race.
        before: folder of the previous lap. The lap resumes from the checkpoint in this folder. If None, the lap starts
            at the first round.
    """
    states = {} if before is None else {p.name: p for p in sorted(before.glob("checkpoint-*")) if p.is_file()}
    checkpoint = {name: b64encode(path.read_bytes()).decode() for name, path in states.items()}
    values = {"label": method["label"], "seed": seed, "method": dict(method), "rounds": rounds, "end": end}
    return json.dumps({**values, "metric": metric, "seeds": [*seeds], "checkpoint": checkpoint})


def compute_lap(experiment: str, unit: str, data: bytes | None = None) -> bytes:
    """Train one lap of a race in any process, and return the reply as bytes.

    The same arguments always give the same result.

    Args:
        experiment: text that `fedloom.lab.experiment.units.travel.pack_experiment` returned.
        unit: text that `pack_lap` returned.
        data: bytes that `pack_experiment` returned. Each worker receives the data only once.

    Returns:
        A `UnitReply` that contains the result and the checkpoint of the lap, encoded as bytes.

    Raises:
        DataError: the worker's data differ from the data of the experiment.
        ConfigError: the worker cannot import code that the experiment needs.
    """
    if not receive_data(experiment, data):
        return UnitReply({}, wants_data=True, worker=worker_name()).pack()
    lap = json.loads(unit)
    with unit_folder() as folder:
        method = parse({**read_document(experiment), "method": [lap["method"]]}, "executor").methods[0]
        setting = lap_setting(method.setting, lap["seed"], lap["rounds"])
        setting = setting.with_(engine=setting.engine.with_(workers=1))
        for name, content in lap["checkpoint"].items():
            write_atomic(folder / name, b64decode(content))
        fed = _cut_federations(experiment, tuple(lap["seeds"]))[lap["seeds"].index(lap["seed"])]
        ended = run_lap(setting, fed, lap["end"], lap["metric"], folder, [])
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if ended else {}
        if any(path.is_dir() for path in folder.iterdir()):  # a reply contains only files
            files = {LAP_FILE: files[LAP_FILE]} if ended else {}
        return UnitReply(files, interrupted=not ended, worker=worker_name()).pack()


@lru_cache(maxsize=2)
def _cut_federations(experiment: str, seeds: tuple[int, ...]) -> list[Federation]:
    """Return the federations of a race, one per seed."""
    return cut_validation(read_federation(experiment, seeds[0]), len(seeds))
