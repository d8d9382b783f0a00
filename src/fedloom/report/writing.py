"""Write the files of a report, each as a whole, and refuse to write over a file that no report wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from fedloom.errors import ConfigError, check_folder, explain_os_error
from fedloom.output_paths import KINDS, Kind, check_output_file, is_run_directory, never
from fedloom.rundir import FOLDERS, REPORT

MARK = " · fedloom report</title>"
"""End of the title of a report, which no other page has."""
FIRST_BYTES = 4096
"""Bytes of a page within which its title ends; the name of an experiment has far fewer characters."""


def check_report(run_dirs: Sequence[Path], out: Path, *, force: bool = False) -> Path:
    """Return the folder beside a report, in which its tables and charts lie, once both may be written.

    Raises:
        RunDirError: the folder is a file.
        ConfigError: see `fedloom.report.write`.
    """
    beside = out.with_suffix("")
    if out.suffix.lower() not in KINDS["HTML"] or out.is_dir():
        raise ConfigError(f"a report is one HTML file, got {out}; give a name such as {out.with_suffix('.html')}")
    if beside.is_symlink():
        raise ConfigError(f"{beside} is a link, through which a report would overwrite other files; remove the link")
    check_folder(beside)

    def owns(place: Path) -> bool:
        return len(place.parts) == 1 and place.stem not in FOLDERS

    check_output_file(out, Kind("HTML", "a report", _is_report), run_dirs, owns=owns, force=force)
    if is_run_directory(beside):
        raise ConfigError(f"{beside} is a run directory, and the tables of {out} would lie in it; give another path")
    return beside


def _is_report(path: Path) -> bool:
    if path.name == REPORT and is_run_directory(path.parent):
        return True
    with path.open("rb") as file:
        return MARK.encode() in file.read(FIRST_BYTES)


def check_tables(out: Path, beside: Path, names: Iterable[str], *, force: bool) -> None:
    """Refuse to replace files in the folder beside a report that no report wrote.

    A report wrote the files if the report itself is there, or if the folder belongs to a run directory.

    Raises:
        ConfigError: a file is there without a report, or is a link or a folder.
    """
    kind = Kind("other", "a table or chart of a report", lambda _path: out.exists() or is_run_directory(out.parent))
    for name in names:
        path = beside / name
        if path.exists() or path.is_symlink():
            check_output_file(path, kind, owns=lambda _place: True, force=force)


def check_card(out: Path) -> None:
    """Refuse to write a model card over a file.

    Raises:
        ConfigError: the file is there; people may have written into it.
    """
    if out.exists():
        raise ConfigError(f"{out} is there and may hold what people wrote into it; move it, then write it anew")

    def owns(place: Path) -> bool:
        return len(place.parts) == 2 and place.parts[0] not in FOLDERS

    check_output_file(out, Kind("Markdown", "a model card", never), owns=owns)


def replace_text(path: Path, text: str) -> None:
    """Write a text under a temporary name first, so that no half-written file is ever seen.

    Raises:
        CheckpointError: the disk is full or refuses.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with explained(path):
        try:
            draft.unlink(missing_ok=True)
            draft.touch(exist_ok=False)  # a file of its own, not a link to another
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def explained(path: Path) -> AbstractContextManager[None]:
    """Report in one sentence that a file of a report could not be written."""
    return explain_os_error(path, "the results of the run are", "'fedloom report' with the run directory writes it")
