"""Status: which process is working on which run in a directory, its progress, and its failures."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path

from fedloom.engine.checks.moved import update_document
from fedloom.errors import RunDirError
from fedloom.lab.experiment.units.joined import BEGIN_STAGE, FAILED_FILE, FINISH_STAGE
from fedloom.rundir import (
    CHECKPOINTS_FOLDER,
    SETTINGS_FILE,
    SUMMARY_FILE,
    WORK_FOLDER,
    compared_tables,
    get_label,
    read_summary,
    run_folder,
)
from fedloom.storage.checkpoint import Checkpoints
from fedloom.storage.claims import Claims


def list_status(out: Path) -> list[dict[str, str]]:
    """Return a row for each run, and for each other unit in progress, with the columns run, state, who and so far.

    A run that has not ended is ``waiting``, ``working``, or ``left`` (its process has ended, and another process will
    continue it). The states of a run that has ended are ``done``, ``diverged``, ``interrupted`` and ``failed``.
    """
    document = update_document(tomllib.loads((out / SETTINGS_FILE).read_text(encoding="utf-8")))
    claims, ended = Claims(out / WORK_FOLDER), dict[tuple[str, int], tuple[str, str]]()
    if not (out / WORK_FOLDER).exists():
        with suppress(OSError, RunDirError):
            for run in read_summary(out / SUMMARY_FILE).runs:
                ended[run.method, run.seed] = run.status, "" if run.status == "done" else run.reason
    rows, names = list[dict[str, str]](), set[str]()
    for label in map(get_label, compared_tables(document)):
        for seed in document["seeds"]:
            folder = run_folder(out, CHECKPOINTS_FOLDER, label, seed)
            names.add(folder.name)
            state, detail = ended.get((label, seed)) or _unfinished_run_state(folder, claims)
            rows.append(
                {"run": f"{label}, seed {seed}", "state": state, **_claimant_text(claims, folder.name, state, detail)}
            )
    for unit in claims.units():
        if unit not in names and not (claims.folder / unit / "done").exists():
            state = "left" if (holder := claims.claimant(unit)) is None or holder.has_ended else "working"
            what = {BEGIN_STAGE: "preparing the directory", FINISH_STAGE: "writing tables and report"}.get(unit, unit)
            if state == "working":
                rows.append({"run": what, "state": state, **_claimant_text(claims, unit, state, "")})
    return rows


def _unfinished_run_state(folder: Path, claims: Claims) -> tuple[str, str]:
    """Return the state, with details, of a run whose end is not recorded in the summary."""
    failed = claims.folder / folder.name / FAILED_FILE
    with suppress(OSError):
        return "failed", failed.read_text(encoding="utf-8")
    meta = Checkpoints(folder).meta() if folder.exists() else None
    if meta is not None:
        return ("done" if meta["stop"] == "DONE" else "working" if not meta["stop"] else meta["stop"].lower()), (
            f"round {meta['round']}"
        )
    holder = claims.claimant(folder.name)
    return "waiting" if holder is None else "left" if holder.has_ended else "working", ""


def _claimant_text(claims: Claims, unit: str, state: str, detail: str) -> dict[str, str]:
    holder = claims.claimant(unit)
    who = "" if holder is None else f"process {holder.pid} on {holder.host}"
    return {"who": who, "so far": detail or ("" if holder is None else holder.progress)}
