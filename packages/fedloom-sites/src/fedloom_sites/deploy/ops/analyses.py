"""State of a run's analyses on the server's disk, as shown by `fedloom deploy status`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.analyses import ANALYSES, Analysis
from fedloom.engine.checks.moved import move_analyses
from fedloom_sites.deploy.analyses import file_stem_of
from fedloom_sites.deploy.server.analyses import SUMS_PATTERN


def analysis_states(
    document: Mapping[str, Any], checkpoints: Path, log: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the progress of a run's sum-based analyses.

    Args:
        document: the experiment file's contents.
        checkpoints: folder of the server's checkpoints.
        log: lines of the audit log, which may have been written by an earlier version.

    Returns:
        For each analysis: its ``name``, its ``state`` ("waits", "begun", "none" or "done"), the number of ``sums`` so
        far, the ``reason``, and at the end the number of ``rows``.
    """
    return [_analysis_state(name, checkpoints, log) for name in _analysis_names(document)]


def _analysis_names(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the analyses that are, or may be, computed from sums."""
    for table in move_analyses(document).get("analysis", ()):
        name = str(table.get("kind", ""))
        try:
            may_sum = name not in ANALYSES or ANALYSES[name].answer is not Analysis.answer
        except ImportError:  # of a package that is not installed here
            may_sum = True
        if may_sum:
            yield name


def _analysis_state(name: str, checkpoints: Path, log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    stem = file_stem_of(name)
    former = [*checkpoints.glob(f"{stem}-[0-9]*.json")]
    sums = len([*(checkpoints / stem).glob(SUMS_PATTERN)]) or len(former)
    end = next((line for line in reversed(log) if _is_end(line, name)), None)
    about: dict[str, Any] = {"name": name, "sums": sums, "reason": ""}
    if end is None:
        return about | {"state": "begun" if sums else "waits"}
    if "reason" in end:
        return about | {"state": "none", "reason": end["reason"]}
    return about | {"state": "done", "rows": end.get("rows", 0)}


def _is_end(line: Mapping[str, Any], name: str) -> bool:
    """Return True if a line of the log reports the end of an analysis.

    In logs of earlier versions, this line contains the name of a regression.
    """
    what = str(line.get("what"))
    if what in ("analysis", "no result"):
        return line.get("analysis") == name
    return what == name or re.sub(r"^no (\S+) regression$", r"\1", what).lower() == name


def describe_analysis(state: Mapping[str, Any]) -> str:
    """Describe the state of an analysis in words."""
    if state["state"] == "done":
        return f"done, {state['rows']} rows, {state['sums']} sums"
    if state["state"] == "none":
        return f"none, {state['reason']}"
    return f"{state['sums']} sums so far" if state["sums"] else "after the last round"
