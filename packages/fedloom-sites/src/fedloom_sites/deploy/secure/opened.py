"""Record of the sums that a site helped to open.

With this record, the site can reject a sum that would reveal a difference. There is one record per site and data set,
and the data set is identified by its agreed name. The record continues across experiments, snapshots of the rows, and
keys.

Each round has only one sum, for a single model, a single set of sites, and a single state of each site. If the same
models are requested again in a different round or experiment, the sites and states must either be the same, or differ
in so many sites that the difference is itself a sum over enough sites. Different models may be almost the same, so sums
over them must also cover the same sites with the same weights (see `fedloom_sites.deploy.secure.changes`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.storage import make_folder, release_lock, take_lock, write_atomic
from fedloom.storage.disk import check_regular_file
from fedloom_sites.deploy.audit import SENT_FILE, read_entries
from fedloom_sites.deploy.secure.changes import (
    LOST_RECORD,
    MAX_CHANGES,
    MAX_REMEMBERED_EXPERIMENTS,
    AnswerStates,
    CohortChanges,
)
from fedloom_sites.deploy.secure.counters import NEUTRAL_COUNTS
from fedloom_sites.deploy.secure.protocol import MAX_ANALYSIS_STEPS, ProtocolBroken

MAX_REMEMBERED_SUMS = 64
"""Number of an experiment's latest sums that a site remembers. The site takes no part in a sum of an older round."""
OPENED_FILE = "opened.json"
STEPS_FILE_SUFFIX = "-steps.json"
"""Suffix of the files that record a site's analysis steps. The site records a step before it answers the step."""
ANALYSES_ENTRY = "analyses"
"""Key of the entry for every analysis without an entry of its own."""


class OpenedSums:
    """A site's record of the sums over one data set.

    Args:
        folder: folder with the site's state in this experiment.
        memory: folder for what the site remembers about these data across experiments. None if the site remembers only
            this experiment.
        names: names of the sites, in the order of their numbers. A site without a name is identified by its number.
        changes: maximum number of times that a site may leave the sums or return to them (see `CohortChanges`).
        steady: minimum number of sites in a sum that have never changed (see `CohortChanges`).
        own: number of this site. None if the site may have a different name in every experiment.
    """

    def __init__(
        self, folder: Path, memory: Path | None = None, names: Sequence[str] = (), changes: int = MAX_CHANGES,
        steady: int = 0, own: int | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._names, self._limit, self._steady = folder, names, changes, steady
        self._own = "" if own is None else self._name(f"{own}")  # the name under which other sites count its changes
        self._memory = memory or folder / "session"

    def begin(self, name: bytes, before: str | None) -> None:
        """Record that a session replaces the previous session.

        Args:
            name: name of the new session.
            before: name of the previous session, in hexadecimal digits.

        Raises:
            ProtocolBroken: the new session has already ended.
        """
        if before == name.hex():
            return
        with self._open() as record:
            experiment = self._read_experiment(record)
            if name.hex() in experiment["past"]:
                raise ProtocolBroken("this session is over")
            if before is not None and _record_session_end(experiment, before):
                self._write(record)

    def check_change(
        self, sums: Mapping[str, int], models: Mapping[str, str], bases: Mapping[str, int], question: str,
        weights: Mapping[str, Mapping[str, Sequence[float]]],
    ) -> None:  # fmt: skip
        """Raise an error if a sum differs from the last sum in a site that has already left or returned too often.

        A sum that was already opened may be repeated, for example after the server has lost its newest checkpoints.

        Args:
            sums: round of each sum, by kind of sum.
            models: see `reveal`.
            bases: round of each site's state for its answer, by the site's number.
            question: see `reveal`.
            weights: each site's weights in the sum, keyed by "uploads", "scores" or the name of an analysis (see
                `reveal`).

        Raises:
            ProtocolBroken: a site has left or returned too often. The message contains the site's name.
        """
        with self._open() as record:
            self._check_name(record)
            opened = record["experiments"].get(self._folder.name, {"opened": {}})["opened"]
            again = {w: {**self._describe(w, bases, question, weights), "models": models[w]} for w in sums}
            if all(opened.get(w, {}).get(str(t)) == again[w] for w, t in sums.items()):
                return
            states = self._collect_states(sums, bases)
            self._changes(record).add_sum(*self._find_unknown_sites(bases, weights), states)

    def stays_neutral(self) -> bool:
        """Return True if uploads must stay neutral, because switching twice more would exceed the agreed changes.

        The content of a neutral upload is known, so the difference between a sum that contains it and the previous sum
        reveals the site's earlier upload. The effect is the same as if the site had left the sum.
        """
        with self._open() as record:
            return has_used_turns(record, self._limit)

    def reveal(
        self, name: str, sums: Mapping[str, int], models: Mapping[str, str], bases: Mapping[str, int], threshold: int,
        question: str = "", *, weights: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
        counts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Record a sum and the end of its session before the site reveals a share for the sum.

        Args:
            name: name of the session, in hexadecimal digits.
            sums: round of each sum, keyed by "uploads", "scores" or the name of an analysis.
            models: digest of the summed models, keyed by "uploads", "scores" or the name of an analysis. Empty for
                none.
            bases: round of each site's state for its answer, keyed by the site's number.
            threshold: minimum number of sites in a sum.
            question: question that the sum answers, or an empty string if the session has none. For a question, the
                round is its step number, and all steps cover the same sites.
            weights: each site's weights in the sum, keyed by "uploads", "scores" or the name of an analysis, and then
                by the site's number. If a site's contribution is already known, all of its weights are zero. None if
                the sum contains noise and may therefore cover any sites.
            counts: the site's counters (see `counters`), if the session has counters.

        Raises:
            ProtocolBroken: the sum would reveal a difference that covers too few sites, its round was already summed
                for different sites, states or models, or its round is too old to check.
        """
        with self._open() as record:
            experiment, is_new = self._read_experiment(record), False
            for what, t in sums.items():
                entry = self._describe(what, bases, question, weights)
                named = entry["bases"]  # a name may be the number of another site
                opened: dict[str, Any] = experiment["opened"].setdefault(what, {})
                forgotten = experiment["forgotten"]
                if t <= forgotten.get(what, -1 if what in ("uploads", "scores") else forgotten.get(ANALYSES_ENTRY, -1)):
                    raise ProtocolBroken(
                        f"round {t} is too long ago: fedloom no longer knows whether the {what} of "
                        "this round were already summed"
                    )
                before = opened.get(str(t), {})
                opened[str(t)] = new = {**entry, "models": models[what]}
                is_new |= not before or before.get("weights", new["weights"]) != new["weights"]
                before = before and {**before, "weights": new["weights"]}  # other weights are a change of sites
                if before and before["bases"].keys() != named.keys():
                    raise ProtocolBroken(
                        f"the {what} of round {t} were already summed over different sites. The "
                        "difference between the two sums would reveal individual sites"
                    )
                if before and before != new:
                    raise ProtocolBroken(
                        f"the {what} of round {t} were already summed for a different model or from different states"
                    )
                for other in self._find_same_models(record, what, models[what]):
                    apart = sum(named.get(c) != other["bases"].get(c) for c in {*named, *other["bases"]})
                    if 0 < apart < threshold:
                        raise ProtocolBroken(
                            f"the {what} on these models were already summed in another round, and {apart} of the "
                            "sites differ. The difference between the two sums would reveal these sites"
                        )
                while len(opened) > MAX_REMEMBERED_SUMS:
                    oldest = min(opened, key=int)
                    del opened[oldest]
                    experiment["forgotten"][what] = int(oldest)
            if is_new and weights is not None:
                changes = self._changes(record).add_sum(
                    *self._find_unknown_sites(bases, weights), self._collect_states(sums, bases)
                )
                record |= {"sites": changes.record, "own": self._own}
            if is_new and "uploads" in sums and any(counts[:2]):
                is_neutral = tuple(counts[:2]) == NEUTRAL_COUNTS[:2]
                record["turns"] += is_neutral != record["neutral"]
                record["neutral"] = is_neutral
            _record_session_end(experiment, name)
            self._write(record)

    # ------------------------------------------------------------------------------------------------------- inside

    def _name(self, client: str) -> str:
        return self._names[int(client)] if client.isdecimal() and int(client) < len(self._names) else client

    def _find_unknown_sites(
        self, clients: Iterable[str], weights: Mapping[str, Mapping[str, Sequence[float]]]
    ) -> tuple[list[str], dict[str, dict[str, tuple[float, ...]]]]:
        """Return the sites in a sum whose contribution is unknown, and their weights by name."""
        listed = {self._name(c) for c in clients}
        named = {
            what: {self._name(c): tuple(values) for c, values in one.items() if self._name(c) in listed}
            for what, one in weights.items()
        }
        recorded = {c for one in named.values() for c, values in one.items() if not any(values)}
        return sorted(listed - recorded), {
            what: {c: values for c, values in one.items() if c not in recorded} for what, one in named.items()
        }

    def _check_name(self, record: Mapping[str, Any]) -> None:
        """Raise an error if this site took part in earlier sums over the data under a different name.

        Raises:
            ProtocolBroken: the site has a different name in this agreement.
        """
        if record.get("own", self._own) != self._own:
            raise ProtocolBroken(
                "this site took part in earlier sums over these data under another name, and under the new name its "
                "changes would be counted from zero. Keep the earlier name of the site in the agreement"
            )

    def _describe(
        self, what: str, bases: Mapping[str, int], question: str,
        weights: Mapping[str, Mapping[str, Sequence[float]]] | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the entry of a sum in the record of opened sums, without its models.

        The other sums of the session do not matter: a round's uploads may be summed again without scores.
        """
        named = self._find_unknown_sites(bases, {w: one for w, one in (weights or {}).items() if w == what})[1]
        digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
        step = {"question": question} if question else {}
        return {"bases": {self._name(c): t for c, t in bases.items()}, "weights": digest, **step}

    def _collect_states(self, sums: Mapping[str, int], bases: Mapping[str, int]) -> AnswerStates:
        named = {self._name(c): t for c, t in bases.items()}
        return AnswerStates(self._folder.name, sums.get("uploads"), named)

    def _changes(self, record: Mapping[str, Any]) -> CohortChanges:
        return CohortChanges(record["sites"], self._limit, self._steady)

    @staticmethod
    def _find_same_models(record: Mapping[str, Any], what: str, models: str) -> Iterator[Mapping[str, Any]]:
        """Yield the sums over the same models in all experiments."""
        for experiment in record["experiments"].values() if models else ():
            for one in experiment["opened"].get(what, {}).values():
                if one["models"] == models:
                    yield one

    @contextmanager
    def _open(self) -> Iterator[dict[str, Any]]:
        """Yield the record while its lock is held.

        All processes of the site that run experiments on the same data share the record.

        If the record is missing or damaged although the site has given shares for a sum, the site cannot know which
        sites that sum covered. In that case, the next sum fixes the sites: from then on, no site may leave or return.
        """
        had_folder = self._memory.is_dir()
        with lock_folder(self._memory):
            values = read_checked(self._memory / OPENED_FILE)
            if values is None:
                records = self._memory.parent.glob(f"data-*/{OPENED_FILE}")  # records of sums over other data
                summed = {e for path in records for e in (read_checked(path) or {}).get("experiments", ())}
                logs = (f.parent for f in self._folder.parent.glob(f"*/{SENT_FILE}") if f.parent.name not in summed)
                lost = had_folder and any(map(_summed_rounds, logs))
                values = {"experiments": {}, "sites": LOST_RECORD if lost else {}, "neutral": False, "turns": 0}
            yield values

    def _write(self, record: dict[str, Any]) -> None:
        own_sums, other_sums = self._folder.name, record["experiments"]
        kept = [*(e for e in other_sums if e != own_sums), own_sums][-MAX_REMEMBERED_EXPERIMENTS:]
        write_checked(self._memory / OPENED_FILE, {**record, "experiments": {e: other_sums[e] for e in kept}})

    def _read_experiment(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the part of the record that belongs to this experiment.

        If there is no such part, all rounds up to the newest round are treated as summed.

        The newest round is determined from the existing states and from the site's log of sent shares. All steps of
        analyses are then also treated as summed, unless complete records show that the site did not answer any step. A
        site records a step before it masks a vector, and reveals no shares for a sum that does not include its own
        vector.
        """
        content: dict[str, Any] | None = record["experiments"].get(self._folder.name)
        if content is not None:
            return content
        rounds = [int(p.stem.partition("-")[2]) for p in self._folder.glob("round-*.state")]
        newest = max([*rounds, *_summed_rounds(self._folder)], default=-1)
        answered = [read_checked(path) or {} for path in self._folder.glob(f"*{STEPS_FILE_SUFFIX}")]
        untouched = bool(answered) and all(one.get("whole") is True and not one["steps"] for one in answered)
        steps = {} if newest < 0 or untouched else {ANALYSES_ENTRY: MAX_ANALYSIS_STEPS}
        document = {"past": [], "opened": {}, "forgotten": {"uploads": newest, "scores": newest, **steps}}
        record["experiments"][self._folder.name] = document
        self._write(record)
        return document


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process uses a folder's files, and create the folder if it is missing.

    Raises:
        RunDirError: the disk does not support file locks.
    """
    make_folder(folder, mode=0o700)
    fd = os.open(folder / ".turn", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        take_lock(fd, folder, wait=True)
        yield
    finally:
        release_lock(fd)
        os.close(fd)


def has_used_turns(record: Mapping[str, Any], limit: int) -> bool:
    """Return True if a site's uploads stay neutral, according to its record (see `OpenedSums.stays_neutral`).

    Args:
        record: the site's record of opened sums, or an empty mapping.
        limit: agreed number of changes.
    """
    return bool(record.get("neutral")) and int(record["turns"]) >= max(1, limit - 1)


def _summed_rounds(folder: Path) -> list[int]:
    """Return the rounds of an experiment that a site provided shares for, according to its log of sent data."""
    return [
        line["round"]
        for line in read_entries(folder / SENT_FILE)
        if line.get("kind") in ("count", "unmask") and line.get("status") == "ok" and isinstance(line.get("round"), int)
    ]


def _record_session_end(record: dict[str, Any], name: str) -> bool:
    """Record that a session has ended, and return True if its end was not yet recorded."""
    new = name not in record["past"]
    if new:
        record["past"] = [*record["past"], name][-MAX_REMEMBERED_SUMS:]
    return new


def read_checked(path: Path) -> dict[str, Any] | None:
    """Return the values in a file with a checksum, or None if the file is missing or damaged."""
    try:
        text, _, digest = check_regular_file(path).read_bytes().rpartition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        values = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def write_checked(path: Path, values: Mapping[str, object]) -> None:
    """Write JSON-compatible values and their checksum durably, in a folder that only its owner can read."""
    make_folder(path.parent, mode=0o700)
    text = json.dumps(values).encode()
    write_atomic(path, text + b"\n" + hashlib.sha256(text).hexdigest().encode())
