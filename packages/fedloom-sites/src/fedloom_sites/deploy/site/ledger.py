"""Ledger of an experiment's releases under differential privacy.

An entry is always written before the noise is drawn, and never afterwards.

A crash between the entry and the release consumes budget, even though nothing was released. If a round is requested
again, the site answers with the reply that it has stored, so no new noise is added and the round is not counted again.
If a round must be computed again because its download differs, it is counted again.

Each line contains its number and the SHA-256 of the previous line. A line cut short by a crash remains part of the
chain: the next line contains the SHA-256 of its bytes. If the chain is broken, has fewer lines than there are releases
in the state next to the ledger, or lacks a round accepted by the server, the site cannot know how much was
spent, and releases nothing more.

A site's limit applies to its data: the epsilon and delta of several experiments add up, so it includes the epsilon
spent by other experiments on data with the same name. The site's memory of these data stores the epsilon of every
ledger.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from fedloom.engine.privacy import Noise, epsilon
from fedloom.errors import Refused
from fedloom.storage import make_folder
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import append_line, create_file
from fedloom_sites.deploy.audit import complete_lines, digest_line, find_broken_line, parse_entry
from fedloom_sites.deploy.noise import remaining_noise
from fedloom_sites.deploy.secure.opened import lock_folder, read_checked, write_checked

LEDGER_FILE, SPENT_FILE = "ledger.jsonl", "epsilon.json"
"""Files with an experiment's releases, and with the epsilon of each experiment on the same data."""


class BudgetSpent(Refused):
    """Error: the budget does not allow a release. The message reveals nothing about the samples."""


class Ledger:
    """Releases by the server or a site in one experiment.

    Args:
        folder: folder with the ledger.
        noise: noise that the accounting covers. None if no delta is set.
        limit: value that epsilon must never exceed. None if there is no limit.
        who: owner of the budget, as named in messages.
        least: minimum number of releases that the ledger must list, according to the state stored next to it.
        accepted: round whose release the server has accepted, or 0 if there is none.
        memory: folder that remembers facts about the data across experiments, if the limit applies to all experiments.
    """

    def __init__(
        self, folder: Path, noise: Noise | None, limit: float | None, who: str, least: int = 0, accepted: int = 0,
        memory: Path | None = None,
    ) -> None:  # fmt: skip
        self._path, self._noise, self._limit, self._who = folder / LEDGER_FILE, noise, limit, who
        self._least, self._accepted, self._memory = least, accepted, memory

    def releases(self) -> int:
        """Return the number of entries, including an entry cut short by a crash.

        Raises:
            BudgetSpent: the file is damaged, or entries are missing.
        """
        return len(self._lines())

    def _content(self) -> bytes:
        try:
            return check_regular_file(self._path).read_bytes() if self._path.exists() else b""
        except OSError as error:
            raise BudgetSpent(
                f"the ledger of {self._who}, {self._path}, cannot be read ({error.strerror}), so the "
                "spent budget is unknown. Restore a copy of the ledger, or start a new experiment"
            ) from None

    def _lines(self) -> list[bytes]:
        lines = complete_lines(self._content())
        if (broken := find_broken_line(lines)) is not None:
            raise BudgetSpent(
                f"the ledger of {self._who}, {self._path}, is damaged in line {broken}, so the "
                "spent budget is unknown. Restore a copy of the ledger, or start a new experiment"
            )
        rounds = {(parse_entry(line) or {}).get("round") for line in lines}
        if len(lines) < self._least:
            raise BudgetSpent(
                f"the ledger of {self._who}, {self._path}, lists {len(lines)} releases, but the state in the same "
                f"folder counts {self._least}. Restore the newest copy of the ledger, or start a new experiment"
            )
        if self._accepted and self._accepted not in rounds:
            raise BudgetSpent(
                f"the ledger of {self._who}, {self._path}, lists no release of round "
                f"{self._accepted}, which the server has accepted, so the spent budget is unknown. "
                "Restore the newest copy of the ledger, or start a new experiment"
            )
        return lines

    def release(self, round: int, **facts: str) -> int:
        """Record a release with further information, such as a digest of its samples, and return the release's number.

        Returns:
            The number of the release, or 0 without accounting.

        Raises:
            BudgetSpent: the limit would be exceeded, or it is unknown how much was spent.
            CheckpointError: the entry cannot be written.
        """
        if self._noise is None and self._limit is None:
            return 0
        if self._noise is None:
            raise BudgetSpent(
                f"{self._who} does not release anything without accounted noise (epsilon = {self._limit}), but the "
                "experiment has neither upload_transform 'gaussian-noise' nor aggregator 'private-mean' with a delta"
            )
        lines = self._lines()
        count = len(lines) + 1
        spent = epsilon(self._noise, count)
        if self._limit is not None and spent > self._limit:
            raise BudgetSpent(
                f"the privacy budget of {self._who} is spent: release {count} would raise epsilon to "
                f"{spent:.4g}, but the limit is {self._limit:.4g}"
            )
        chain = {"number": count, "before": digest_line(lines[-1]) if lines else ""}
        entry = chain | {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "round": round,
            "epsilon": spent,
            **facts,
        }
        alone = remaining_noise(self._noise)
        if alone is not None:
            entry["epsilon_sites"] = epsilon(alone, count)
        line = json.dumps(entry).encode()
        if self._memory is not None:
            self._add_to_memory(self._memory, digest_line(lines[0] if lines else line), spent)
        make_folder(self._path.parent)
        create_file(self._path)
        append_line(self._path, line)
        return count

    def _add_to_memory(self, memory: Path, ledger: str, spent: float) -> None:
        """Record the epsilon spent in this ledger next to the epsilon of the other ledgers on the same data.

        Args:
            memory: folder.
            ledger: digest of the ledger's first line, which stays the same if the ledger is moved to a new agreement.
            spent: epsilon of the ledger's releases.

        Raises:
            BudgetSpent: all ledgers together would exceed the limit, or their epsilon is unknown.
        """
        with lock_folder(memory):
            path = memory / SPENT_FILE
            record = read_checked(path)
            if record is None and path.exists():
                raise BudgetSpent(
                    f"{path} is damaged, so the budget that other experiments on these data have "
                    "spent is unknown. Restore a copy of this file"
                )
            record = (record or {}) | {ledger: spent}
            further, total = len(record) - 1, sum(record.values())
            if further and self._limit is not None and total > self._limit:
                raise BudgetSpent(
                    f"the privacy budget of {self._who} is spent: with {further} other experiments on these data, this "
                    f"release would raise epsilon to {total:.4g}, but the limit is {self._limit:.4g}"
                )
            write_checked(path, record)
