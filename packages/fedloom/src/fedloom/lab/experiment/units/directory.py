"""State of a run directory before its runs start, and its experiment."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.analyses import ANALYSES
from fedloom.analyses.fitted import Fitted, run_setting
from fedloom.analyses.registry import get_analysis_name
from fedloom.data.federation import Federation
from fedloom.engine.setting import Setting
from fedloom.errors import RunDirError, Stop
from fedloom.lab.experiment.file import difference_to_recorded
from fedloom.lab.experiment.outputs import write_settings, write_splits
from fedloom.lab.experiment.schema import Experiment, Method
from fedloom.outputs import is_run_directory
from fedloom.rundir import (
    CHECKPOINTS_FOLDER,
    MODELS_FOLDER,
    RESULT_FILES,
    RESULT_FOLDERS,
    SETTINGS_FILE,
    WORK_FOLDER,
    analysis_file,
    check_case,
    get_label,
    run_folder,
)
from fedloom.storage.checkpoint import Checkpoints
from fedloom.storage.claims import Claims, publish
from fedloom.storage.files import is_unused, refuse_links


class ExperimentDirectory:
    """Run directory of an experiment, as the last process left it.

    Args:
        experiment: experiment of the directory.
        out: path of the directory.
        force: True to discard existing results in `prepare`.
        partly: True to discard only the results of the methods in this experiment. The directory must already belong to
            this experiment.
    """

    def __init__(self, experiment: Experiment, out: Path, *, force: bool, partly: bool) -> None:
        self.experiment, self.out, self.force, self._partly = experiment, out, force, partly
        self.runs = [(m, seed) for m in experiment.compared for seed in experiment.head.seeds]

    def folder(self, kind: str, method: Method, seed: int) -> Path:
        """Return the folder that contains a run's checkpoints or models."""
        return run_folder(self.out, kind, method.label, seed)

    def check(self, *, joins: bool = False) -> None:
        """Raise an error if the directory is not a run directory, or belongs to a different experiment.

        The methods and seeds in the directory may differ from those of this experiment.

        If other processes are working in the directory (``joins``), the methods and seeds must be the same.

        Raises:
            RunDirError: the directory cannot be used. The message states the reason.
        """
        if is_unused(self.out):
            return
        settings = self.out / SETTINGS_FILE
        if not settings.exists():
            raise RunDirError(
                f"{self.out} is not empty and not a run directory (no experiment.toml). Choose another --out"
            )
        if not is_run_directory(self.out):
            raise RunDirError(
                f"{settings} was not written by a run, but would be overwritten. Choose another --out, or move the file"
            )
        refuse_links(self.out, RESULT_FOLDERS)
        if self.force and not self._partly:
            return
        free = [f"{table}.{field}" for table, value in Setting.tables().items() for field in value.base.free]
        patterns = [*map(re.escape, [*([] if joins else ["name", "rounds", "seeds"]), *free])]
        patterns += [] if joins else ["method .*: rounds"]
        if self.force:
            patterns += [f"method {re.escape(method.label)}: .*" for method in self.experiment.methods]
        try:
            before = {key: value for key, value in tomllib.loads(settings.read_text()).items() if key != "resolved"}
            difference = difference_to_recorded(before, self.experiment.settings(), "|".join(patterns))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise RunDirError(
                f"{settings} is damaged: {error}. Choose another --out, or start over with --force"
            ) from None
        if not difference and joins:
            difference = self._describe_other_methods(before)
        if difference and joins:
            raise RunDirError(
                f"{self.out}: another experiment's processes are using this folder: {difference}. "
                "To join them, use the same settings. To change settings, wait until all processes have "
                f"ended. If no process is left, delete {self.out / WORK_FOLDER}"
            )
        if difference:
            raise RunDirError(
                f"{self.out} contains a different experiment: {difference}. Choose another --out, or "
                "start over with --force"
            )

    def _describe_other_methods(self, before: Mapping[str, Any]) -> str:
        was, now = [get_label(method) for method in before["method"]], [m.label for m in self.experiment.methods]
        return "" if was == now else f"methods were {', '.join(was)}, now {', '.join(now)}"

    def prepare(self, federations: Mapping[int, Federation], claims: Claims | None = None) -> None:
        """Prepare the directory for the runs of this experiment.

        If ``claims`` is True, unfinished runs are released so that any process can claim them.

        Raises:
            RunDirError: the directory belongs to a different experiment, or its runs cannot be extended to more rounds.
        """
        check_case(self.out, [method.label for method in self.experiment.compared])
        self.check()
        if self.force:
            self._clear()
        self._check_rounds(federations)
        self._discard_other_fits()
        write_settings(self.out, self.experiment)
        write_splits(self.out, federations)
        if claims is not None:
            for method, seed in self.runs:
                folder = self.folder(CHECKPOINTS_FOLDER, method, seed)
                if (
                    folder.exists()
                    and not is_whole(folder, method.setting.rounds)
                    and (claim := claims.take(folder.name)) is not None
                ):
                    if not publish(folder, claim.state):
                        shutil.rmtree(folder)
                    claim.release()
        elif (self.out / WORK_FOLDER).exists():
            self._take_over_results(Claims(self.out / WORK_FOLDER))

    def _check_rounds(self, federations: Mapping[int, Federation]) -> None:
        """Prepare finished runs for more rounds, or raise an error if a run depends on its total number of rounds."""
        longer = list[Path]()
        for method, seed in self.runs:
            folder, setting = self.folder(CHECKPOINTS_FOLDER, method, seed), method.setting.with_(seed=seed)
            planned = (Checkpoints(folder).meta() or {}).get("numbers", {}).get("rounds", setting.rounds)
            if planned < setting.rounds:
                run_setting(setting, federations[seed], folder=folder, advance=False)
                longer.append(self.folder(MODELS_FOLDER, method, seed))
        for models in longer:  # these models were trained for fewer rounds
            shutil.rmtree(models, ignore_errors=True)
        for analysis in self.experiment.analyses if longer else ():
            if analysis.runs_further:
                (self.out / analysis_file(get_analysis_name(analysis))).unlink(missing_ok=True)

    def _discard_other_fits(self) -> None:
        """Delete models that an analysis fitted with different options, so that they are refitted."""
        for method, seed in self.runs:
            algorithm, before = method.setting.algorithm, Checkpoints(self.folder(CHECKPOINTS_FOLDER, method, seed))
            now = algorithm.analysis if isinstance(algorithm, Fitted) else None
            if now and (meta := before.meta()) and meta["numbers"].get("algorithm.analysis") != now:
                for kind in (CHECKPOINTS_FOLDER, MODELS_FOLDER):
                    shutil.rmtree(self.folder(kind, method, seed), ignore_errors=True)

    def _take_over_results(self, claims: Claims) -> None:
        """Take over the results of processes that joined the experiment and have since ended.

        Raise an error if one of these processes may still be working.
        """
        claims.check_ended()
        for method, seed in self.runs:
            folder = self.folder(CHECKPOINTS_FOLDER, method, seed)
            if (state := claims.find_abandoned(folder.name)) is not None:
                publish(state, folder)
        claims.forget()

    def _clear(self) -> None:
        """Delete the results that are no longer needed.

        ``experiment.toml`` is not deleted now but replaced later, so that the folder remains recognizable as a run
        directory.
        """
        self.force = False
        if self._partly:
            for method, seed in self.runs:
                for kind in (CHECKPOINTS_FOLDER, MODELS_FOLDER):
                    shutil.rmtree(self.folder(kind, method, seed), ignore_errors=True)
            return
        for name in RESULT_FOLDERS:
            shutil.rmtree(self.out / name, ignore_errors=True)
        for name in (*RESULT_FILES, *map(analysis_file, ANALYSES)):
            (self.out / name).unlink(missing_ok=True)


def is_whole(folder: Path, rounds: int) -> bool:
    """Return True if a folder contains a finished run's checkpoint with this number of rounds."""
    meta = Checkpoints(folder).meta() or {}
    stop, planned = str(meta.get("stop")), meta.get("numbers", {}).get("rounds", rounds)
    return planned == rounds and stop in Stop.__members__ and not Stop[stop].is_resumable
