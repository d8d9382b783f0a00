"""Laps: stages of the training runs in a race.

Each lap continues from the previous lap and is scored on the two halves of the validation data.
"""

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
from fedloom.data.groups import get_subjects
from fedloom.data.subjects.cut import ranks_within
from fedloom.engine.setting import Evaluate, Setting
from fedloom.engine.simulate import Progress, simulate
from fedloom.engine.state import State
from fedloom.errors import CodeError, PartitionError, Refused, RunStopped, Stop
from fedloom.formats import finite_or_none
from fedloom.processes.clients import CLIENT_COUNTS
from fedloom.seeds import generator
from fedloom.storage.checkpoint import Checkpoints
from fedloom.storage.files import make_folder, write_atomic

LAP_FILE = "lap.json"
"""File that contains a lap's result."""
DECIDING_PART, ESTIMATING_PART = "validation", "test"
"""Parts of a race's federation: one decides the race, and the other is used only for the final estimates. Both parts
contain validation data of the experiment."""
Subjects = NDArray[np.int64]
"""Subjects ``[k]``: either an array of subject numbers in increasing order, or an array with one number per subject."""
MODEL_KINDS = ("global", "personal", "hybrid")
"""Kinds of models that are scored if the method trains them. If several of these kinds exist, a client would use the
last one."""


class Arm(NamedTuple):
    """A candidate in a race: a method with specific settings.

    Attributes:
        label: label of the method.
        number: index of the candidate among all candidates of the same method. Candidate 0 has the settings of the
            experiment file, if the search space contains them.
        params: values of the settings, keyed by name.
    """

    label: str
    number: int
    params: Mapping[str, Any]


class Lap(NamedTuple):
    """Training of a candidate (arm) with one seed, up to a given fraction of a full run's work."""

    arm: Arm
    seed: int
    depth: float


class LapResult(NamedTuple):
    """Result of a lap.

    Attributes:
        round: number of rounds that have been trained so far.
        samples: number of sample gradients computed so far, including gradients for the personal models of the last
            evaluation.
        trained: the same number, excluding the gradients for these personal models.
        bytes: number of bytes sent so far, in both directions.
        seconds: virtual time so far, in seconds. None if no devices are simulated.
        scores: score of each client, keyed by kind of model and part. None if a score is unknown.
        reason: reason why the scores are missing. If the scores exist, the reason is empty.
    """

    round: int
    samples: int
    trained: int
    bytes: int
    seconds: float | None
    scores: Mapping[str, Mapping[str, Sequence[float | None]]]
    reason: str = ""

    def values(self, part: str, model: str = "") -> NDArray[np.float64] | None:
        """Return each client's score on a part, for one kind of model.

        The default is the kind of model that a client would use.

        Return None if there is no such model.
        """
        kinds = [model] if model else [kind for kind in reversed(MODEL_KINDS) if kind in self.scores]
        scores = self.scores.get(kinds[0]) if kinds else None
        return None if scores is None else np.array([np.nan if v is None else v for v in scores[part]])


def cut_validation(fed: Federation, seeds: int = 1) -> list[Federation]:
    """Return the federations of a race, one per seed.

    These federations contain no test data. Some samples are held out for the final estimates.

    Half of each client's validation subjects are held out for the final estimates, as the part ``test``. The race
    itself never uses these subjects. With the first seed, models are validated on the other half. With every other
    seed, models are validated on the same number of subjects from the training set instead. In exchange, the same
    number of subjects from that other half are used for training. Every seed therefore adds new validation data, and
    the number of training subjects is the same for all seeds. If the data are ordered in time, all seeds validate on
    the same, later half. The samples of a subject stay together, and the class proportions are preserved. If a client
    has only one validation subject, this subject is used to decide the race.
    """
    cut = _ValidationCut(fed)
    decide, kept = cut.halve_validation()
    design = fed.data.design
    turns = [0] * seeds if design is not None and design.order is not None else range(seeds)
    first = cut.make_federation(decide, kept, decide)
    return [first if turn == 0 else cut.make_fold(decide, kept, turn, seeds) or first for turn in turns]


class _ValidationCut:
    """Rows of the training and validation sets, grouped by subject."""

    def __init__(self, fed: Federation) -> None:
        self._fed, units = fed, get_subjects(fed.data)
        parts = [fed.parts[part].index.cpu().numpy() for part in ("train", DECIDING_PART)]
        owners = [fed.owner(part).cpu().numpy() for part in ("train", DECIDING_PART)]
        self._rows, self._owner = np.concatenate(parts), np.concatenate(owners)
        self._validates = np.repeat([False, True], [len(rows) for rows in parts])
        self._who = self._rows if units is None else units.numpy()[self._rows]
        purpose = generator(fed.seed, purpose="advise")
        self._draw = torch.rand(len(fed.data), generator=purpose, dtype=torch.float64).numpy()

    def halve_validation(self) -> tuple[Subjects, Subjects]:
        """Return the validation subjects that decide the race, and the subjects held out for the final estimates."""
        subjects, _, turn = self._rank_subjects(np.unique(self._who[self._validates]))
        return subjects[turn % 2 == 0], subjects[turn % 2 == 1]

    def make_fold(self, decide: Subjects, kept: Subjects, turn: int, turns: int) -> Federation | None:
        """Return the federation for one of the seeds after the first.

        Return None if a client would have no training samples.
        """
        fold = self._choose_fold(decide, turn, turns)
        try:
            return self.make_federation(fold, kept, self._choose_as_many(decide, fold))
        except PartitionError:  # another client has the same subjects
            return None

    def _choose_fold(self, decide: Subjects, turn: int, turns: int) -> Subjects:
        """Choose as many validation subjects from the training set as each client had, spread across its classes."""
        clients = self._fed.n
        trained, home, rank = self._rank_subjects(np.unique(self._who[~self._validates]))
        sizes = np.bincount(home, minlength=clients)
        wanted = np.minimum(np.bincount(self._rank_subjects(decide)[1], minlength=clients), sizes // 2)[home]
        place = rank + (turn * sizes[home]) // (turns * np.maximum(wanted, 1))  # differs by seed
        in_fold = (place + 1) * wanted // sizes[home] > place * wanted // sizes[home]
        fold: Subjects = trained[in_fold]
        return fold

    def _choose_as_many(self, decide: Subjects, fold: Subjects) -> Subjects:
        """For each client, choose as many deciding subjects as the client's fold contains.

        With this choice, no seed trains on more subjects.
        """
        clients = self._fed.n
        subjects, home, rank = self._rank_subjects(decide)
        sizes, wanted = (np.bincount(one, minlength=clients)[home] for one in (home, self._rank_subjects(fold)[1]))
        chosen: Subjects = subjects[(rank + 1) * wanted // sizes > rank * wanted // sizes]
        return chosen

    def make_federation(self, decide: Subjects, kept: Subjects, first: Subjects) -> Federation:
        """Return a federation that evaluates models on the given subjects.

        Validation subjects that are in ``first`` are used for validation or training. The other validation subjects are
        not used in the race.
        """
        fed, rests = self._fed, ~self._validates | np.isin(self._who, first)
        chosen = np.isin(self._who, decide) & rests
        masks = {"train": rests & ~chosen, DECIDING_PART: chosen, ESTIMATING_PART: np.isin(self._who, kept)}
        none = torch.zeros(0, dtype=torch.int64, device=fed.device)
        partition = fed.partition and {**fed.partition, "test": 0.0}  # no test data, on purpose
        parts = {part: self._part(mask) for part, mask in masks.items()}
        return replace(fed, parts={**fed.parts, **parts}, test=none, partition=partition)

    def _part(self, mask: NDArray[np.bool_]) -> Split:
        order = np.flatnonzero(mask)
        order = order[np.argsort(self._owner[order], kind="stable")]
        ends = np.concatenate([[0], np.cumsum(np.bincount(self._owner[order], minlength=self._fed.n))])
        index, offsets = torch.from_numpy(self._rows[order]), torch.from_numpy(ends)
        return Split(index.to(self._fed.device), offsets.to(self._fed.device))

    def _rank_subjects(self, subjects: Subjects) -> tuple[Subjects, Subjects, Subjects]:
        """Return the subjects, their clients, and their ranks within each client.

        Ranks are ordered by class, and are random within a class.
        """
        rows = np.flatnonzero(np.isin(self._who, subjects))
        subjects, first = np.unique(self._who[rows], return_index=True)
        place = rows[first]
        home = self._owner[place]
        y = self._fed.data.y[torch.from_numpy(self._rows[place]).to(self._fed.device)]
        label = y.reshape(len(place), -1)[:, -1].double().cpu().numpy()
        order = np.lexsort((self._draw[subjects], label, home))
        return subjects, home, ranks_within(home, order, np.bincount(home, minlength=self._fed.n))


def lap_setting(setting: Setting, seed: int, rounds: int) -> Setting:
    """Return the setting of a candidate's run, with an evaluation at the end of a lap."""
    evaluate = Evaluate(every=rounds, parts=(DECIDING_PART, ESTIMATING_PART), select_on=DECIDING_PART)
    return setting.with_(seed=seed, evaluate=evaluate, rounds=rounds)


def run_lap(
    setting: Setting, fed: Federation, stop_at: int, metric: str, folder: Path, progress: Sequence[Progress]
) -> bool:
    """Train a lap in a folder, resuming from a checkpoint if there is one, and write its result.

    Returns:
        True if the lap was completed, or False if the user stopped it.
    """
    try:
        result = simulate(setting, fed, folder=folder, callbacks=progress, pause=stop_at)
        if result.stop is Stop.INTERRUPTED and result.state.round < stop_at:
            return False
        lost = "" if result.stop in (Stop.DONE, Stop.INTERRUPTED) else str(RunStopped(result.stop, result.detail))
        lap = _make_lap_result(result.state, metric, lost)
    except (RunStopped, CodeError, Refused) as error:
        lap = LapResult(0, 0, 0, 0, None, {}, str(error))
    make_folder(folder)
    write_atomic(folder / LAP_FILE, json.dumps(lap._asdict(), sort_keys=True, allow_nan=False).encode())
    return True


def read_lap(folder: Path) -> LapResult:
    """Read the result of a lap from its folder."""
    return LapResult(**json.loads((folder / LAP_FILE).read_text(encoding="utf-8")))


def copy_checkpoint(before: Path, folder: Path) -> None:
    """Copy the newest checkpoint of the previous lap, so that the next lap resumes from it.

    The checkpoint must contain the complete state.

    Otherwise, the next lap starts at round 1.
    """
    names = [path.name for path in before.iterdir()] if before.is_dir() else []
    states = [name for name in names if name != LAP_FILE]
    whole = states and all(name.startswith("checkpoint-") for name in states)
    if whole and not any(folder.glob("checkpoint-*")):
        make_folder(folder)
        Checkpoints(before).copy_newest(folder)


def _make_lap_result(state: State, metric: str, lost: str) -> LapResult:
    counts = dict(zip(CLIENT_COUNTS, state.totals.tolist(), strict=False))
    whole = state.records.last("", "", "samples_backward")
    scores = dict[str, dict[str, list[float | None]]]()
    for model in MODEL_KINDS:
        parts = {part: state.records.last(model, part, metric) for part in (DECIDING_PART, ESTIMATING_PART)}
        if parts[DECIDING_PART] is not None:
            scores[model] = {
                part: [] if values is None else [finite_or_none(float(v)) for v in values]
                for part, values in parts.items()
            }
    used = next((scores[kind] for kind in reversed(MODEL_KINDS) if kind in scores), {})
    if not lost and all(value is None for value in used.get(DECIDING_PART, [])):
        lost = f"the validation {metric} is NaN for every client"
    return LapResult(
        state.round,
        int(counts["samples_backward"] if whole is None else whole[0]),
        int(counts["samples_backward"]),
        int(counts["bytes_up"] + counts["bytes_down"]),
        None if state.clock is None else float(state.clock.now),
        {} if lost else scores,
        lost,
    )
