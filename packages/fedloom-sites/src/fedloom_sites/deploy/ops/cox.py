"""The state of a Cox regression on the server's disk, for `fedloom deploy status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.engine.checks.moved import move_analyses
from fedloom_sites.deploy.secure.opened import read_checked


def cox_state(
    document: Mapping[str, Any], checkpoints: Path, log: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Describe the progress of a run's Cox regression, or None if none was agreed on.

    Args:
        document: the experiment file.
        checkpoints: folder of the server's.
        log: lines of the audit log.

    Returns:
        ``state`` ("waits", "begun", "none" or "done"), ``sums`` so far, ``reason``, in the end ``rows``, ``events``.
    """
    if not any(analysis.get("kind") == "cox" for analysis in move_analyses(document).get("analysis", ())):
        return None
    kept = (read_checked(path) or {} for path in checkpoints.glob("cox-[0-9]*.json"))
    sums = sum(step.get("total") is not None for step in kept)
    end = next((line for line in reversed(log) if line.get("what") in ("cox", "no Cox regression")), None)
    if end is None:
        return {"state": "begun" if sums else "waits", "sums": sums, "reason": ""}
    if end["what"] == "cox":
        return {"state": "done", "sums": sums, "reason": "", "rows": end["rows"], "events": end["events"]}
    return {"state": "none", "sums": sums, "reason": end["reason"]}


def words_of(cox: Mapping[str, Any]) -> str:
    """Describe the state of a Cox regression."""
    if cox["state"] == "done":
        return f"done, {cox['rows']} rows with {cox['events']} events, {cox['sums']} sums"
    if cox["state"] == "none":
        return f"none, {cox['reason']}"
    return f"{cox['sums']} sums so far" if cox["sums"] else "after the last round"
