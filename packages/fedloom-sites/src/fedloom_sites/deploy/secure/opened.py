"""Opened: the sums that a site has given shares for, so that no second one reveals the difference between the two.

Of a round there is one sum: of one model, one set of sites, and one state of each. Of the same models asked for in
another round, as after a round that was lost, sites and states are the same, or so many differ that their difference is
a sum of enough sites itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.storage.disk import regular
from fedloom.storage.files import make_folder, write_atomic
from fedloom_sites.deploy.audit import SENT, lines_of
from fedloom_sites.deploy.cox import STEPS, STEPS_FILE
from fedloom_sites.deploy.secure.protocol import Broken

REMEMBERED = 64
"""Newest sums that a site remembers; it has no part in one of an older round."""


class OpenedSums:
    """The sums of one site in one experiment.

    Args:
        folder: of its state in this experiment.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "session" / "opened.json"

    def begin(self, name: bytes, before: str | None) -> None:
        """Enter that a session takes the place of the one before.

        Args:
            name: of the new one.
            before: the other's name, as hexadecimal digits.

        Raises:
            Broken: the new one is over.
        """
        record = self._load()
        if before == name.hex():
            return
        if name.hex() in record["past"]:
            raise Broken("this session is over")
        if before is not None and _ended(record, before):
            write_checked(self._path, record)

    def reveal(
        self, name: str, sums: Mapping[str, int], models: Mapping[str, str], bases: Mapping[str, int], threshold: int,
        question: str = "",
    ) -> None:  # fmt: skip
        """Enter a sum, and that its session is over, before a share of it is given.

        Args:
            name: of the session, as hexadecimal digits.
            sums: the round of what is summed, by what that is.
            models: digest of the models that it is of, by what it is; empty for none.
            bases: the round of the state that each of its sites answers from, by the site's number.
            threshold: fewest sites of a sum.
            question: what the sum is of beside models; a round of it is a step, and steps have the same sites.

        Raises:
            Broken: it would reveal a difference that is of too few sites, or of another model in the same round.
        """
        record = self._load()
        for what, t in sums.items():
            opened: dict[str, Any] = record["opened"].setdefault(what, {})
            if t <= record["forgotten"].get(what, -1):
                raise Broken(f"round {t} is too long ago to know whether its {what} were summed already")
            new = {"bases": {**bases}, "models": models[what], **({"question": question} if question else {})}
            before = opened.setdefault(str(t), new)
            if before["bases"].keys() != bases.keys():
                raise Broken(
                    f"the {what} of round {t} were summed already, of other sites; the two sums reveal their difference"
                )
            if before != new:
                raise Broken(f"the {what} of round {t} were summed already, on another model or from other states")
            for other in (one for one in opened.values() if models[what] and one["models"] == models[what]):
                apart = sum(bases.get(c) != other["bases"].get(c) for c in {*bases, *other["bases"]})
                if 0 < apart < threshold:
                    raise Broken(
                        f"the {what} on these models were summed already, in another round, of sites of which {apart} "
                        "differ; the two sums reveal their difference"
                    )
            while len(opened) > REMEMBERED:
                oldest = min(opened, key=int)
                del opened[oldest]
                record["forgotten"][what] = int(oldest)
        _ended(record, name)
        write_checked(self._path, record)

    def _load(self) -> dict[str, Any]:
        """Read the record; where it is gone or damaged, make one by which all rounds up to the newest are summed.

        The newest is that of a state that is there, or of a session of which the site gave shares, by its log of what
        left it. So are all steps of a Cox regression, but where a whole record shows that the site has answered none:
        it enters a step before it masks a vector, and gives shares of no sum without its own.
        """
        values = read_checked(self._path)
        if values is not None:
            return values
        rounds = [int(p.stem.partition("-")[2]) for p in self._folder.glob("round-*.state")]
        for line in lines_of(self._folder / SENT):
            if (
                line.get("kind") in ("count", "unmask")
                and line.get("status") == "ok"
                and isinstance(line.get("round"), int)
            ):
                rounds.append(line["round"])
        newest = max(rounds, default=-1)
        answered = read_checked(self._folder / STEPS_FILE) or {}
        untouched = answered.get("whole") is True and not answered["steps"]
        steps = {"cox": STEPS - 1} if newest >= 0 and not untouched else {}
        values = {"past": [], "opened": {}, "forgotten": {"uploads": newest, "scores": newest, **steps}}
        write_checked(self._path, values)
        return values


def _ended(record: dict[str, Any], name: str) -> bool:
    """Enter a session that is over in the record; whether it was not there."""
    new = name not in record["past"]
    if new:
        record["past"] = [*record["past"], name][-REMEMBERED:]
    return new


def read_checked(path: Path) -> dict[str, Any] | None:
    """The values of a file with its checksum; None where it is missing or damaged."""
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
