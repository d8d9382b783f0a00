"""Laps: runs of a race, each from where the lap before it ended, scored on two halves of the validation data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.federation import Federation, Split
from fedloom.data.groups import subjects_of
from fedloom.data.subjects.cut import ranks_within
from fedloom.engine.setting import Evaluate, Setting
from fedloom.engine.simulate import Progress, simulate
from fedloom.engine.state import State
from fedloom.errors import CodeError, Refused, RunStopped, Stop
from fedloom.formats import finite
from fedloom.processes.clients import CLIENT_COUNTS
from fedloom.seeds import generator
from fedloom.storage.checkpoint import Checkpoints
from fedloom.storage.files import make_folder, write_atomic

LAP_FILE = "lap.json"
"""File of a lap with its result."""
DECIDING_PART, ESTIMATING_PART = "validation", "test"
"""Parts of the federation of a race: what the race reads, and what only the answer reads. Both are validation data."""
ESTIMATING_TURN = 3
"""Of so many validation subjects of a client, one is kept for the answer."""
MODEL_KINDS = ("global", "personal", "hybrid")
"""Models that are scored where a method has them. The last one is what a client would use."""


class Arm(NamedTuple):
    """Method with the settings that one entry of the race has.

    Attributes:
        label: of the method.
        number: of the entry among those of its method, 0 for the file's own settings.
        params: values by setting.
    """

    label: str
    number: int
    params: Mapping[str, Any]


class Lap(NamedTuple):
    """An arm with a seed, trained up to a share of the work of a whole run."""

    arm: Arm
    seed: int
    depth: float


class LapResult(NamedTuple):
    """What a lap has led to.

    Attributes:
        round: rounds so far.
        samples: samples whose gradient was taken so far, personal models of the last evaluation included.
        trained: the same without these models.
        bytes: sent so far, both ways.
        seconds: virtual time so far. None without devices.
        scores: value of every client by part, by model. None where it is not known.
        reason: why there are no scores. Empty otherwise.
    """

    round: int
    samples: int
    trained: int
    bytes: int
    seconds: float | None
    scores: Mapping[str, Mapping[str, Sequence[float | None]]]
    reason: str = ""

    def values(self, part: str, model: str = "") -> NDArray[np.float64] | None:
        """Value of every client on a part, of the model that a client would use or of a given one. None without one."""
        kinds = [model] if model else [kind for kind in reversed(MODEL_KINDS) if kind in self.scores]
        scores = self.scores.get(kinds[0]) if kinds else None
        return None if scores is None else np.array([np.nan if v is None else v for v in scores[part]])


def cut_validation(fed: Federation) -> Federation:
    """Make the federation of a race: without test data, with the validation data in two parts.

    One of `ESTIMATING_TURN` validation subjects of every client is kept for the answer, as the part ``test``. Subjects
    stay whole, and classes keep their shares. A client with one validation subject gives it to the race.
    """
    index, offsets = fed.parts[DECIDING_PART]
    rows, owner = index.cpu().numpy(), fed.owner(DECIDING_PART).cpu().numpy()
    units = subjects_of(fed.data)
    who = rows if units is None else units.numpy()[rows]
    subjects, first = np.unique(who, return_index=True)
    home, label = owner[first], fed.data.y[index[first]].reshape(len(first), -1)[:, -1].double().cpu().numpy()
    draw = torch.rand(len(fed.data), generator=generator(fed.seed, purpose="advise"), dtype=torch.float64).numpy()
    turn = ranks_within(home, np.lexsort((draw[subjects], label, home)), np.bincount(home, minlength=fed.n))
    kept = torch.from_numpy(np.isin(who, subjects[turn % ESTIMATING_TURN == 1]))

    def part(mask: torch.Tensor) -> Split:
        sizes = torch.bincount(torch.from_numpy(owner)[mask], minlength=fed.n)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return Split(index[mask.to(index.device)], ends.to(offsets.device))

    parts = {**fed.parts, DECIDING_PART: part(~kept), ESTIMATING_PART: part(kept)}
    none = torch.zeros(0, dtype=torch.int64, device=index.device)
    partition = fed.partition and {**fed.partition, "test": 0.0}  # no test data, on purpose
    return replace(fed, parts=parts, test=none, partition=partition)


def lap_setting(setting: Setting, seed: int, rounds: int) -> Setting:
    """Make the run of an arm, which is evaluated where a lap ends."""
    evaluate = Evaluate(every=rounds, parts=(DECIDING_PART, ESTIMATING_PART), select_on=DECIDING_PART)
    return setting.with_(seed=seed, evaluate=evaluate, rounds=rounds)


def run_lap(
    setting: Setting, fed: Federation, stop_at: int, metric: str, folder: Path, progress: Sequence[Progress]
) -> bool:
    """Train up to a round in a folder, from its checkpoint if there is one, and write the result.

    Returns:
        Whether the lap came to its end. The user stopped it otherwise.
    """
    try:
        result = simulate(setting, fed, folder=folder, progress=progress, pause=stop_at)
        if result.stop is Stop.INTERRUPTED and result.state.round < stop_at:
            return False
        lost = "" if result.stop in (Stop.DONE, Stop.INTERRUPTED) else str(RunStopped(result.stop, result.detail))
        lap = _result(result.state, metric, lost)
    except (RunStopped, CodeError, Refused) as error:
        lap = LapResult(0, 0, 0, 0, None, {}, str(error))
    make_folder(folder)
    write_atomic(folder / LAP_FILE, json.dumps(lap._asdict(), sort_keys=True, allow_nan=False).encode())
    return True


def read_lap(folder: Path) -> LapResult:
    """Read the result of a lap."""
    return LapResult(**json.loads((folder / LAP_FILE).read_text(encoding="utf-8")))


def copy_checkpoint(before: Path, folder: Path) -> None:
    """Start a lap where another one has ended, if its state is in its checkpoint. Else the lap trains from round 1."""
    names = [path.name for path in before.iterdir()] if before.is_dir() else []
    states = [name for name in names if name != LAP_FILE]
    whole = states and all(name.startswith("checkpoint-") for name in states)
    if whole and not any(folder.glob("checkpoint-*")):
        make_folder(folder)
        Checkpoints(before).copy_newest(folder)


def _result(state: State, metric: str, lost: str) -> LapResult:
    counts = dict(zip(CLIENT_COUNTS, state.totals.tolist(), strict=False))
    whole = state.records.last("", "", "samples_backward")
    scores = dict[str, dict[str, list[float | None]]]()
    for model in MODEL_KINDS:
        parts = {part: state.records.last(model, part, metric) for part in (DECIDING_PART, ESTIMATING_PART)}
        if parts[DECIDING_PART] is not None:
            scores[model] = {
                part: [] if values is None else [finite(float(v)) for v in values] for part, values in parts.items()
            }
    used = next((scores[kind] for kind in reversed(MODEL_KINDS) if kind in scores), {})
    if not lost and all(value is None for value in used.get(DECIDING_PART, [])):
        lost = f"the validation {metric} is not a number at any client"
    return LapResult(
        state.round,
        int(counts["samples_backward"] if whole is None else whole[0]),
        int(counts["samples_backward"]),
        int(counts["bytes_up"] + counts["bytes_down"]),
        None if state.clock is None else float(state.clock.now),
        {} if lost else scores,
        lost,
    )
