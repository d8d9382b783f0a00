"""Measurement of cells (a cell is a method in a setup): first the trials for tuning, then runs with new seeds.

Only missing parts are run. Cells are processed in any order, and the work stops when the time limit is reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from fedloom.data import Federation
from fedloom.errors import ConfigError, DataError, FedloomError, RunDirError, RunStopped, Stop
from fedloom.lab.experiment import Listener, Plan, parse
from fedloom.lab.report import read_runs
from fedloom.processes import WorkerPool, check_alone, interruptible, useful_processes
from fedloom.rundir import WORK_FOLDER
from fedloom.storage import Claims, lock
from fedloom_studies.map.budget import GradientBudget
from fedloom_studies.map.judge import judge_setup
from fedloom_studies.map.records import (
    DONE_STATUS,
    FAILED_STATUS,
    NOT_APPLICABLE_STATUS,
    REUSED_STATUS,
    CellRecord,
    new_record,
    read_records,
    read_series,
    record_cell,
    stale_reason,
)
from fedloom_studies.map.setups import REFERENCE_METHODS, Cell, Protocol, Setup, list_methods
from fedloom_studies.reproduce import summary as summaries
from fedloom_studies.reproduce.estimate import seconds_per_round
from fedloom_studies.reproduce.execute import ShowProgress, TimeBudget
from fedloom_studies.reproduce.recipe import NominalDataset

if TYPE_CHECKING:
    from fedloom.lab.tune import SearchResult

PAUSE_SECONDS = 0.5
"""Time, in seconds, between two checks for a cell that no other process is measuring."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def cells_to_run(
    setups: Iterable[Setup], records: Mapping[tuple[str, str], CellRecord], methods: Sequence[str] = (),
    space: Mapping[str, object] = NO_OPTIONS, *, again: bool = False, old: bool = False, protocol: Protocol = "rounds",
) -> list[Cell]:  # fmt: skip
    """Return the cells that need to be run, setup by setup, starting with the reference methods.

    Cells whose records lack seeds of the setup's plan are included, unless they are stale.

    Args:
        setups: setups to include.
        records: existing records.
        methods: requested methods. Stale cells of these methods are also run again. If no methods are named, all
            methods of the protocol are included.
        space: search space for the settings of the requested methods.
        again: True to select recorded cells that have not been confirmed with other seeds, rather than missing cells.
        old: True to include cells with stale records.
        protocol: protocol of the cells and of their records.
    """
    cells_due = []
    for setup in setups:
        for name in (
            dict.fromkeys([*REFERENCE_METHODS[:2], *methods]) if methods else setup.methods or list_methods(protocol)
        ):
            cell = Cell(setup, name, dict(space) if name in methods else {}, protocol)
            record = records.get((setup.name, name))
            if again:
                wants = (
                    record is not None
                    and record.status == DONE_STATUS
                    and not record.again
                    and not stale_reason(cell, record)
                )
            else:
                wants = (
                    record is None
                    or ((old or name in methods) and bool(stale_reason(cell, record)))
                    or bool(missing_seeds(cell, record) and not stale_reason(cell, record))
                )
            cells_due += [cell] if wants else []
    return cells_due


def missing_seeds(cell: Cell, record: CellRecord) -> tuple[int, ...]:
    """Return the planned seeds that a cell's record lacks. A record without a result does not lack any."""
    return tuple(seed for seed in cell.seeds if str(seed) not in record.seeds) if record.status == DONE_STATUS else ()


def measure_all(
    todo: Sequence[Cell], records: Mapping[tuple[str, str], CellRecord], results: Path, out: Path,
    data_dir: Path | None, budget: TimeBudget, show: ShowProgress, say: Callable[[str], object], *, again: bool = False,
    workers: int = 1, join: bool = False,
) -> bool:  # fmt: skip
    """Measure cells and write their records. Return True if all cells have ended.

    Args:
        todo: cells that remain to be run.
        records: records that existed before the call, keyed by setup and method.
        results: file for the records.
        out: folder for the run directories. Each cell uses its own folder inside this one.
        data_dir: folder with the data sets. If the data of a setup are missing, its cells are skipped.
        budget: time limit for all cells.
        show: function that shows the progress of runs.
        say: function that is called with a sentence about each cell.
        again: True to rerun each cell with other seeds, to confirm its verdict.
        workers: number of cells to run at the same time.
        join: True to wait for cells that other processes are measuring, and to take over the cells of processes that
            have died. False to leave other processes' cells to these processes.

    Raises:
        ConfigError: torchrun has started more than one rank.
    """
    check_alone("the map")
    processes = useful_processes(workers, len(todo))
    measured = _CellMeasurement(records, results, out, data_dir, budget, show, say, again)
    if processes == 1:
        return measured.work_through(todo, join=join)

    def handle(_shared: None, _k: int) -> bool:
        return measured._replace(show=hide_progress).work_through(todo, join=True)

    with WorkerPool([handle], processes) as pool, interruptible() as interrupted:
        return all([*pool.map(handle, None, range(processes), interrupted)]) and not interrupted()


def hide_progress(_rounds: int | Mapping[str, int]) -> AbstractContextManager[Listener]:
    """Return a progress display that shows nothing, because several processes would overwrite each other's output."""
    return nullcontext(lambda _event: None)


class _CellMeasurement(NamedTuple):
    """Everything that is needed to measure cells, and the file with their records (see `measure_all`)."""

    records: Mapping[tuple[str, str], CellRecord]
    results: Path
    out: Path
    data_dir: Path | None
    budget: TimeBudget
    show: ShowProgress
    say: Callable[[str], object]
    again: bool

    def work_through(self, todo: Sequence[Cell], *, join: bool) -> bool:
        """Measure every cell that no other process is measuring. Return True if all cells have ended.

        With ``join``, the function starts again until no cells are left.
        """
        claims, missing, budgets = Claims(self.out / WORK_FOLDER), set[str](), dict[str, GradientBudget]()
        with interruptible() as interrupted:
            while todo:
                left_open = list[Cell]()
                for cell in todo:
                    if self.budget.remaining_seconds <= 0 or interrupted():
                        return False
                    with ExitStack() as stack:
                        if not self._has(cell, claims if join else None, stack):
                            left_open.append(cell)
                        elif not self._measure(cell, missing, budgets):
                            return False
                if not join:
                    return True
                if len(left_open) == len(todo):
                    time.sleep(PAUSE_SECONDS)
                todo = left_open
        claims.forget()
        return True

    def _has(self, cell: Cell, claims: Claims | None, stack: ExitStack) -> bool:
        """Return True if this process obtains a cell, and hold the cell until the stack is closed."""
        if claims is not None:
            if (claim := claims.take(str(cell.file).replace("/", "@"))) is None:
                return False
            stack.callback(claim.release)
        try:
            stack.enter_context(lock(self.out / cell.file))
        except RunDirError as busy:
            if claims is None:
                self.say(f"{cell.where}: left out: {busy}")
            return False
        return True

    def _measure(self, cell: Cell, missing: set[str], budgets: dict[str, GradientBudget]) -> bool:
        """Measure a cell, unless another process has recorded it in the meantime.

        Return False if the run was interrupted.
        """
        key, results = (cell.setup.name, cell.method), self.results
        before = self.records.get(key)
        if cell.setup.name in missing or read_records(results, cell.protocol).get(key) != before:
            return True
        try:
            if cell.protocol == "gradients" and cell.setup.name not in budgets:
                budgets.clear()
                budgets[cell.setup.name] = GradientBudget(cell.setup, self.data_dir)
            gradients = budgets.get(cell.setup.name)
            work = CellWork(cell, self.out / cell.file, self.data_dir, self.budget, self.show, gradients)
            first = None if gradients is None else read_records(results).get(key)
            record = work.record(before, first, again=self.again)
        except DataError as error:
            self.say(f"{cell.setup.name}: data are missing: {error}")
            missing.add(cell.setup.name)
            return True
        if record is None:
            return False
        record_cell(record, results)
        self.say(f"{cell.where}: {record.status}{record.reason and f': {record.reason}'}")
        return True


class CellWork(NamedTuple):
    """Measurement of one cell, including its folder and what its runs need."""

    cell: Cell
    folder: Path
    data_dir: Path | None
    budget: TimeBudget
    show: ShowProgress
    gradients: GradientBudget | None
    """Budgets of gradients in the setup, or None at equal rounds."""

    def record(self, before: CellRecord | None, first: CellRecord | None, *, again: bool) -> CellRecord | None:
        """Return the record of the cell, or None if the work was interrupted.

        Args:
            before: earlier record of the same cell.
            first: record of the method at equal rounds, if this cell is at equal gradients.
            again: True to rerun the cell of the earlier record with other seeds, to confirm its verdict.

        Raises:
            DataError: the data are missing.
        """
        if again and before:
            return self.look_again(before)
        if before and (seeds := missing_seeds(self.cell, before)) and not stale_reason(self.cell, before):
            return self.add_seeds(before, seeds)
        return self.reuse(first) or self.confirm(before) or self.measure()

    def reuse(self, first: CellRecord | None) -> CellRecord | None:
        """Return the record of a cell at equal gradients if its runs would be the same as those at equal rounds.

        Return None if a cell is of any other kind.
        """
        if self.gradients is None:
            return None
        with summaries.count_spent_time(self.folder, "planned"):
            try:
                alike = self.gradients.has_equal_work(self.cell, first)
            except ConfigError:  # `measure` adds the sentence
                return None
        reason = "FedAvg's gradients at equal rounds, so the same runs"
        return new_record(self.cell, REUSED_STATUS, reason, self._minutes("planned")) if alike else None

    def measure(self) -> CellRecord | None:
        """Run those parts of the cell that are missing. Return the record, or None if the work was interrupted."""
        cell = self.cell
        with summaries.count_spent_time(self.folder, "cell") as note:
            listeners = (self.budget, lambda _event: note())
            try:
                finding = self._search(listeners) if cell.setup.trials > 1 else None
                chosen = dict(finding.best.params) if finding and finding.best else {}
                fields = self._run(cell.seeds, chosen, listeners) if finding is None or finding.best else {}
            except ConfigError as refused:
                return new_record(cell, NOT_APPLICABLE_STATUS, str(refused).removeprefix(f"{cell.where}: "), 0.0)
            except RunStopped as stopped:
                if stopped.reason is not Stop.INTERRUPTED:
                    raise
                return None
        if fields is None:
            return None
        trials = finding.trials if finding else ()
        reason = fields.pop("reason") if fields else f"no trial completed: {trials[-1].reason}"
        fields["trials"] = [(dict(trial.params), trial.value) for trial in trials] or [({}, None)]
        return new_record(
            cell, FAILED_STATUS if reason else DONE_STATUS, reason, self._minutes("cell"), chosen=chosen, **fields
        )

    def confirm(self, record: CellRecord | None) -> CellRecord | None:
        """Return an outdated record as a current one if rerunning its first seed gives the same values, otherwise None.

        The values must be exactly the same.
        """
        if record is None or record.status != DONE_STATUS or record.digest != self.cell.digest:
            return None
        first = self.cell.setup.seeds[:1]
        with summaries.count_spent_time(self.folder, "confirmed") as note:
            fields = self._run(first, record.chosen, (self.budget, lambda _event: note()))
        same = fields is not None and fields["seeds"].items() <= record.seeds.items() and len(fields["seeds"]) == 1
        return replace(record, source=self.cell.source) if same else None

    def _search(self, listeners: tuple[Listener, ...]) -> SearchResult:
        """Search for the method's settings, and return all trials and the best one."""
        from fedloom.lab.tune import Tuning

        cell = self.cell
        place = self.folder / f"tune-{cell.digest.partition('-')[0]}-{cell.source}"  # more trials may follow
        tuning = Tuning(cell.search, cell.where, place, self.data_dir)
        with self.show(tuning.rounds) as tell:
            (finding,) = tuning.run(lambda *_: None, tell, *listeners, tuned=False)
        return finding

    def look_again(self, record: CellRecord) -> CellRecord | None:
        """Return the record with runs of other seeds added, using the same settings.

        Return None if the work was interrupted.
        """
        with summaries.count_spent_time(self.folder, "again") as note:
            fields = self._run(self.cell.setup.again, record.chosen, (self.budget, lambda _event: note()))
        if fields is None:
            return None
        return replace(record, again=fields["seeds"], minutes=round(record.minutes + self._minutes("again"), 3))

    def add_seeds(self, record: CellRecord, seeds: Sequence[int]) -> CellRecord | None:
        """Return the record with additional seeds' runs, using the same settings.

        Return None if the work was interrupted.
        """
        what = f"seeds from {seeds[0]}"
        with summaries.count_spent_time(self.folder, what) as note:
            fields = self._run(seeds, record.chosen, (self.budget, lambda _event: note()))
        if fields is None:
            return None
        now = summaries.current_commit()
        return replace(
            record, seeds=record.seeds | fields["seeds"], reason=fields["reason"],
            status=FAILED_STATUS if fields["reason"] else DONE_STATUS,
            minutes=round(record.minutes + self._minutes(what), 3),
            commit=record.commit if now in record.commit.split(", ") else f"{record.commit}, {now}",
        )  # fmt: skip

    def run_fields(self, seeds: Sequence[int], chosen: Mapping[str, object]) -> dict[str, Any] | None:
        """Run the method with the given seeds and settings.

        Return the fields of a record, or None if the work was interrupted.
        """
        return self._run(seeds, chosen, (self.budget,))

    def _minutes(self, what: str) -> float:
        return summaries.spent_seconds(self.folder)[what] / 60

    def _run(
        self, seeds: Sequence[int], chosen: Mapping[str, object], listeners: tuple[Listener, ...]
    ) -> dict[str, Any] | None:
        """Run the cell with the given seeds. Return the fields of a record, or None if the work was interrupted."""
        if self.gradients is None:
            return self._run_seeds(seeds, chosen, listeners)
        fields: dict[str, Any] = {}
        for seed in seeds:  # the number of rounds within the budget depends on the clients that the seed draws
            of_seed = self._run_within_budget(self.gradients, seed, chosen, listeners)
            if of_seed is None:
                return None
            lost = fields.get("reason") or of_seed["reason"]
            fields = {**of_seed, **fields, "seeds": fields.get("seeds", {}) | of_seed["seeds"], "reason": lost}
        return fields

    def _run_within_budget(
        self, budget: GradientBudget, seed: int, chosen: Mapping[str, Any], listeners: tuple[Listener, ...]
    ) -> dict[str, Any] | None:
        """Run as many rounds as the budget of gradients allows.

        Return the fields of a record, or None if the work was interrupted.

        If the cost of the run differs too much from the budget, the run is replanned and repeated.
        """
        try:
            rounds = budget.rounds(self.cell, chosen, seed)
        except RunStopped as stopped:
            return {"seeds": {}, "reason": f"seed {seed} without a result: {stopped}"}
        fields = self._run_seeds((seed,), chosen, listeners, rounds=rounds)
        spent = [series.gradients[-1] for series in fields["seeds"].values()] if fields else []
        if any(budget.missed(samples, seed) for samples in spent):
            again = budget.rounds(self.cell, chosen, seed, whole=True)
            return fields if again == rounds else self._run_seeds((seed,), chosen, listeners, rounds=again)
        return fields

    def _run_seeds(
        self, seeds: Sequence[int], chosen: Mapping[str, Any], listeners: tuple[Listener, ...], **more: int
    ) -> dict[str, Any] | None:
        """Run the method with the chosen settings, and with the options in ``more``.

        Return the fields of a record, or None if the work was interrupted.
        """
        from fedloom.lab.tune import replace_params

        cell = self.cell
        document = replace_params({**cell.document, "seeds": list(seeds)}, 0, chosen, **more)
        digest = sha256(repr((document, cell.digest, cell.source)).encode()).hexdigest()[:16]
        place = self.folder / f"run-{digest}"
        plan = Plan(parse(document, cell.where), place, self.data_dir)
        with self.show(plan.rounds) as tell:
            outcomes = plan.run(tell, *listeners, page=False)
        if any(outcome.status == "interrupted" for outcome in outcomes):
            return None
        fields = read_series(read_runs([place])[0], cell.method, seeds)
        lost = [outcome for outcome in outcomes if str(outcome.seed) not in fields["seeds"]]
        note = f"{len(lost)} of {len(outcomes)} seeds without a result: {lost[0].reason}" if lost else ""
        return {**fields, "reason": note}


def estimate_setups(
    setups: Iterable[Setup],
    todo: Sequence[Cell],
    records_by_cell: Mapping[tuple[str, str], CellRecord],
    data_dir: Path | None,
    protocol: Protocol = "rounds",
) -> list[dict[str, Any]]:
    """Return a row for each setup: recorded and missing cells, and the estimated core-minutes for the missing ones.

    ``needed`` is the number of seeds that `SetupVerdict.needed` derives from the ``seeds`` that every method has run.
    """
    rows = []
    for setup in setups:
        records = [record for (name, _), record in records_by_cell.items() if name == setup.name]
        cells_of_setup = [cell for cell in todo if cell.setup is setup]
        spent, searched = sum(r.minutes for r in records), setup.trials if setup.trials > 1 else 0
        runs, share = searched * len(setup.tuning) + len(setup.seeds), setup.decide_share(protocol)
        j = judge_setup(setup, records_by_cell)
        row = {"setup": setup.name, "clients": setup.title, "recorded": len(records), "due": len(cells_of_setup),
               "trials": setup.trials, "seeds": len(j.seeds), "planned": len(setup.stages[-1]),
               "needed": j.needed or "-", "minutes so far": round(spent, 1), "share": share}  # fmt: skip
        rows.append(row)
        try:
            plan = parse({**setup.document, "method": [{"algorithm": "fedavg"}]}, setup.name)
            fed = plan.partition(plan.source.read(data_dir), setup.seeds[0])
        except DataError:
            rows[-1] = {**row, "note": "data missing"}
            continue
        done = [record for record in records if record.status == DONE_STATUS]
        guessed = sum(_core_minutes_per_run(Cell(setup, r.method, r.space, protocol), fed) for r in done) * runs
        factor = sum(r.minutes for r in done) / guessed if guessed else 1.0
        lacking = {r.method: len(missing_seeds(Cell(setup, r.method, r.space, protocol), r)) for r in done}
        searched_cells = [cell for cell in cells_of_setup if not lacking.get(cell.method)]
        each = factor * sum(_core_minutes_per_run(cell, fed) for cell in searched_cells)  # new seeds have no share
        counted = sum(_core_minutes_per_run(cell, fed) * (lacking.get(cell.method) or runs) for cell in cells_of_setup)
        row["estimate"] = round(factor * counted, 1)
        fit = int(((share - spent) / each - len(setup.seeds)) / len(setup.tuning)) if each else setup.trials
        if fit < setup.trials:
            row["note"] = f"beyond its share; {max(0, fit)} trials would fit"
    return rows


def _core_minutes_per_run(cell: Cell, fed: Federation) -> float:
    """Estimate the core-minutes that one run of a cell takes, in a trial or with a new seed.

    The result is 0 if the method cannot be run in this setup.

    At equal gradients, every method is assumed to take as long as FedAvg.
    """
    try:
        plan = cell.plan if cell.protocol == "rounds" else Cell(cell.setup, "fedavg").plan
    except FedloomError:
        return 0.0
    data = NominalDataset(0, 0, tuple(fed.data.x.shape[1:]), max(2, len(fed.data.classes)))
    samples = float(fed.sizes("train").sum()) / fed.n
    return plan.common.rounds * seconds_per_round(plan, plan.methods[0], data, fed.n, samples) / 60
