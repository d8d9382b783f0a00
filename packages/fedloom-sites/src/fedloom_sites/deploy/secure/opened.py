"""Opened: the sums that a site has given shares for, so that no further one reveals the difference between two.

The memory belongs to a site and to data, by the name that data have in the agreement. Another experiment, another
snapshot of the rows or another key continues it.

Of a round there is one sum: of one model, one set of sites, and one state of each. Of the same models asked for in
another round or experiment, sites and states are the same, or so many differ that their difference is a sum of enough
sites itself. Sums of other models may hardly differ, so they are of the same sites too, with the same weights
(`fedloom_sites.deploy.secure.changes`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedloom.storage import hold, make_folder, release, write_atomic
from fedloom.storage.disk import regular
from fedloom_sites.deploy.audit import SENT_FILE, lines_of
from fedloom_sites.deploy.secure.changes import LOST_RECORD, MAX_CHANGES, Changes
from fedloom_sites.deploy.secure.counters import NEUTRAL_COUNTS
from fedloom_sites.deploy.secure.protocol import MOST_STEPS, Broken

REMEMBERED_SUMS = 64
"""Newest sums of an experiment that a site remembers. It has no part in one of an older round."""
EXPERIMENTS_REMEMBERED = 32
"""Newest experiments of whose sums a site remembers the models. It remembers the sites of the newest sum of all."""
OPENED_FILE = "opened.json"
STEPS_FILE_END = "-steps.json"
"""End of the name of a file in which a site enters the steps of an analysis before it answers them."""
ANALYSES = "analyses"
"""Entry for the steps of every analysis that was not summed since the list was made."""


class OpenedSums:
    """The sums of one site on one set of data.

    Args:
        folder: of the site's state in this experiment.
        memory: folder of what the site remembers of these data. None: of this experiment alone.
        names: of the sites, by number. A site without a name goes by its number.
        changes: how often a site may leave the sums or return, see `Changes`.
        steady: fewest sites of a sum that have never done so.
    """

    def __init__(
        self, folder: Path, memory: Path | None = None, names: Sequence[str] = (), changes: int = MAX_CHANGES,
        steady: int = 0,
    ) -> None:  # fmt: skip
        self._folder, self._names, self._limit, self._steady = folder, names, changes, steady
        self._memory = memory or folder / "session"

    def begin(self, name: bytes, before: str | None) -> None:
        """Enter that a session takes the place of the one before.

        Args:
            name: of the new one.
            before: the other's name, as hexadecimal digits.

        Raises:
            Broken: the new one is over.
        """
        if before == name.hex():
            return
        with self._open() as record:
            experiment = self._of_experiment(record)
            if name.hex() in experiment["past"]:
                raise Broken("this session is over")
            if before is not None and _ended(experiment, before):
                self._write(record)

    def check_change(self, clients: Collection[str], weights: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Sign no sum of other sites than the last one, where one of them has left or returned too often.

        Args:
            clients: numbers of the sites.
            weights: what each counts in the sum, by what is summed, see `reveal`.

        Raises:
            Broken: which site has.
        """
        with self._open() as record:
            self._changes(record).after(*self._counting(clients, weights))

    def stays_neutral(self) -> bool:
        """Return whether the site's uploads stay neutral: one more answer, and its next neutral one, would be too many.

        A neutral upload is known, so a sum with it and the sum before differ by what the site sent before. It is as if
        the site had left the sum.
        """
        with self._open() as record:
            return bool(record["neutral"]) and int(record["turns"]) >= max(1, self._limit - 1)

    def reveal(
        self, name: str, sums: Mapping[str, int], models: Mapping[str, str], bases: Mapping[str, int], threshold: int,
        question: str = "", *, weights: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
        counts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Enter a sum, and that its session is over, before a share of it is given.

        Args:
            name: of the session, as hexadecimal digits.
            sums: the round of what is summed, by what that is.
            models: digest of the models that it is of, by what it is. Empty for none.
            bases: the round of the state that each of its sites answers from, by the site's number.
            threshold: fewest sites of a sum.
            question: what the sum is of beside models. A round of it is a step, and steps have the same sites.
            weights: what each site counts in the sum, by what is summed and the site's number. All zeros: what it sends
                is known. None: the sum has noise of its own, so that it may be of any sites.
            counts: the site's own counters (`counters`), where the session has any.

        Raises:
            Broken: it would reveal a difference that is of too few sites, or of another model in the same round.
        """
        with self._open() as record:
            experiment, bases = self._of_experiment(record), {self._name(c): t for c, t in bases.items()}
            is_new = False
            for what, t in sums.items():
                opened: dict[str, Any] = experiment["opened"].setdefault(what, {})
                forgotten = experiment["forgotten"]
                if t <= forgotten.get(what, -1 if what in ("uploads", "scores") else forgotten.get(ANALYSES, -1)):
                    raise Broken(f"round {t} is too long ago to know whether its {what} were summed already")
                new = {"bases": bases, "models": models[what], **({"question": question} if question else {})}
                is_new |= str(t) not in opened
                before = opened.setdefault(str(t), new)
                if before["bases"].keys() != bases.keys():
                    raise Broken(
                        f"the {what} of round {t} were summed already, of other sites; the two sums reveal their "
                        "difference"
                    )
                if before != new:
                    raise Broken(f"the {what} of round {t} were summed already, on another model or from other states")
                for other in self._on_same_models(record, what, models[what]):
                    apart = sum(bases.get(c) != other["bases"].get(c) for c in {*bases, *other["bases"]})
                    if 0 < apart < threshold:
                        raise Broken(
                            f"the {what} on these models were summed already, in another round, of sites of which "
                            f"{apart} differ; the two sums reveal their difference"
                        )
                while len(opened) > REMEMBERED_SUMS:
                    oldest = min(opened, key=int)
                    del opened[oldest]
                    experiment["forgotten"][what] = int(oldest)
            if is_new and weights is not None:
                changes = self._changes(record).after(*self._counting(bases, weights))
                record |= {"sites": changes.record}
            if is_new and any(counts):
                is_neutral = tuple(counts) == NEUTRAL_COUNTS
                record["turns"] += is_neutral != record["neutral"]
                record["neutral"] = is_neutral
            _ended(experiment, name)
            self._write(record)

    # ------------------------------------------------------------------------------------------------------- inside

    def _name(self, client: str) -> str:
        return self._names[int(client)] if client.isdecimal() and int(client) < len(self._names) else client

    def _counting(
        self, clients: Iterable[str], weights: Mapping[str, Mapping[str, Sequence[float]]]
    ) -> tuple[list[str], dict[str, dict[str, tuple[float, ...]]]]:
        """Return the sites of a sum whose part in it is not known, and what these sites count, by name."""
        listed = {self._name(c) for c in clients}
        named = {
            what: {self._name(c): tuple(values) for c, values in one.items() if self._name(c) in listed}
            for what, one in weights.items()
        }
        recorded = {c for one in named.values() for c, values in one.items() if not any(values)}
        return sorted(listed - recorded), {
            what: {c: values for c, values in one.items() if c not in recorded} for what, one in named.items()
        }

    def _changes(self, record: Mapping[str, Any]) -> Changes:
        return Changes(record["sites"], self._limit, self._steady)

    @staticmethod
    def _on_same_models(record: Mapping[str, Any], what: str, models: str) -> Iterator[Mapping[str, Any]]:
        """Return the sums on the same models, of all experiments."""
        for experiment in record["experiments"].values() if models else ():
            for one in experiment["opened"].get(what, {}).values():
                if one["models"] == models:
                    yield one

    @contextmanager
    def _open(self) -> Iterator[dict[str, Any]]:
        """Hold the record alone: all processes of the site with experiments on the same data share it.

        Where it is gone or damaged, and the site has given shares of a sum, the sites of that sum are not known: the
        next sum tells them, and from then on no site leaves or returns.
        """
        had_folder = self._memory.is_dir()
        with in_turn(self._memory):
            values = read_checked(self._memory / OPENED_FILE)
            if values is None:
                lost = had_folder and any(_summed_rounds(f.parent) for f in self._folder.parent.glob(f"*/{SENT_FILE}"))
                values = {"experiments": {}, "sites": LOST_RECORD if lost else {}, "neutral": False, "turns": 0}
            yield values

    def _write(self, record: dict[str, Any]) -> None:
        own_sums, other_sums = self._folder.name, record["experiments"]
        kept = [*(e for e in other_sums if e != own_sums), own_sums][-EXPERIMENTS_REMEMBERED:]
        write_checked(self._memory / OPENED_FILE, {**record, "experiments": {e: other_sums[e] for e in kept}})

    def _of_experiment(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return this experiment's part of the record. Without one, all rounds up to the newest are summed.

        The newest is that of a state that is there, or of a session of which the site gave shares, by its log of what
        left it. So are all steps of analyses, but where whole records show that the site has answered none:
        it enters a step before it masks a vector, and gives shares of no sum without its own.
        """
        content: dict[str, Any] | None = record["experiments"].get(self._folder.name)
        if content is not None:
            return content
        rounds = [int(p.stem.partition("-")[2]) for p in self._folder.glob("round-*.state")]
        newest = max([*rounds, *_summed_rounds(self._folder)], default=-1)
        answered = [read_checked(path) or {} for path in self._folder.glob(f"*{STEPS_FILE_END}")]
        untouched = bool(answered) and all(one.get("whole") is True and not one["steps"] for one in answered)
        steps = {} if newest < 0 or untouched else {ANALYSES: MOST_STEPS}
        document = {"past": [], "opened": {}, "forgotten": {"uploads": newest, "scores": newest, **steps}}
        record["experiments"][self._folder.name] = document
        self._write(record)
        return document


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process works on the files of a folder, which is made where it is missing.

    Raises:
        RunDirError: the disk has no file locks.
    """
    make_folder(folder, mode=0o700)
    fd = os.open(folder / ".turn", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        hold(fd, folder, wait=True)
        yield
    finally:
        release(fd)
        os.close(fd)


def _summed_rounds(folder: Path) -> list[int]:
    """List the rounds for which a site gave shares of an experiment, by its log of what left it."""
    return [
        line["round"]
        for line in lines_of(folder / SENT_FILE)
        if line.get("kind") in ("count", "unmask") and line.get("status") == "ok" and isinstance(line.get("round"), int)
    ]


def _ended(record: dict[str, Any], name: str) -> bool:
    """Enter a session that is over in the record. Whether it was not there."""
    new = name not in record["past"]
    if new:
        record["past"] = [*record["past"], name][-REMEMBERED_SUMS:]
    return new


def read_checked(path: Path) -> dict[str, Any] | None:
    """Read a file with a checksum. Return None if it is missing or damaged."""
    try:
        text, _, digest = regular(path).read_bytes().rpartition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        values = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def write_checked(path: Path, values: Mapping[str, object]) -> None:
    """Make plain values last, with a checksum, in a folder that only its owner reads."""
    make_folder(path.parent, mode=0o700)
    text = json.dumps(values).encode()
    write_atomic(path, text + b"\n" + hashlib.sha256(text).hexdigest().encode())
