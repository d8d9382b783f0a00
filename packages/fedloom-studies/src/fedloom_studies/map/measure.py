"""Measure cells: first trials, then fresh seeds. Only missing parts are run, in any order, until the time runs out."""

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
from fedloom.processes import WorkerPool, check_alone, interruptible, useful
from fedloom.rundir import WORK_FOLDER
from fedloom.storage import Claims, lock
from fedloom_studies.map.budget import GradientBudget
from fedloom_studies.map.records import (
    DONE_STATUS,
    FAILED_STATUS,
    NOT_APPLICABLE,
    REUSED_STATUS,
    CellRecord,
    new_record,
    read_records,
    record_cell,
    series_of,
    stale,
)
from fedloom_studies.map.setups import REFERENCE_METHODS, Cell, Protocol, Setup, methods_of
from fedloom_studies.reproduce import summary as summaries
from fedloom_studies.reproduce.estimate import per_round
from fedloom_studies.reproduce.execute import Show, TimeBudget
from fedloom_studies.reproduce.recipe import Nominal

if TYPE_CHECKING:
    from fedloom.lab.tune import SearchResult

PAUSE_SECONDS = 0.5
"""Number of seconds between two checks for a free cell."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def due(
    setups: Iterable[Setup], records: Mapping[tuple[str, str], CellRecord], methods: Sequence[str] = (),
    space: Mapping[str, object] = NO_OPTIONS, *, again: bool = False, old: bool = False, protocol: Protocol = "rounds",
) -> list[Cell]:  # fmt: skip
    """Return the cells to run, setup by setup, with the reference methods first.

    Args:
        setups: setups of the cells.
        records: existing records.
        methods: requested methods, whose stale cells are run as well. If empty, all methods in the protocol.
        space: search space for the requested methods.
        again: True for a second look at recorded cells instead of missing cells.
        old: True to include stale cells.
        protocol: protocol of the cells and the records.
    """
    cells_due = []
    for setup in setups:
        for name in dict.fromkeys([*REFERENCE_METHODS[:2], *methods]) if methods else methods_of(protocol):
            cell = Cell(setup, name, dict(space) if name in methods else {}, protocol)
            record = records.get((setup.name, name))
            if again:
                wants = (
                    record is not None and record.status == DONE_STATUS and not record.again and not stale(cell, record)
                )
            else:
                wants = record is None or ((old or name in methods) and bool(stale(cell, record)))
            cells_due += [cell] if wants else []
    return cells_due


def measure_all(
    todo: Sequence[Cell], records: Mapping[tuple[str, str], CellRecord], results: Path, out: Path,
    data_dir: Path | None, budget: TimeBudget, show: Show, say: Callable[[str], object], *, again: bool = False,
    workers: int = 1, join: bool = False,
) -> bool:  # fmt: skip
    """Run cells and write their records. Return True if all cells ended.

    Args:
        todo: cells to run.
        records: records before the call.
        results: file with the records.
        out: folder for the run directories. Each cell has its own folder inside.
        data_dir: folder with the data sets. A setup without its data is omitted.
        budget: time that the cells may take.
        show: function that shows progress.
        say: function that is called for every cell.
        again: True for a second look at each cell.
        workers: number of cells to run at the same time.
        join: True to wait for cells that other processes run, and to take over the cells of processes that have died.
            If False, cells of other processes are left to them.

    Raises:
        ConfigError: torchrun has started several ranks.
    """
    check_alone("the map")
    processes = useful(workers, len(todo))
    measured = _Measured(records, results, out, data_dir, budget, show, say, again)
    if processes == 1:
        return measured.work_through(todo, join=join)

    def handle(_shared: None, _k: int) -> bool:
        return measured._replace(show=hide_progress).work_through(todo, join=True)

    with WorkerPool([handle], processes) as pool, interruptible() as interrupted:
        return all([*pool.map(handle, None, range(processes), interrupted)]) and not interrupted()


def hide_progress(_rounds: int | Mapping[str, int]) -> AbstractContextManager[Listener]:
    """Return a display that shows nothing, since several processes would overwrite each other's output."""
    return nullcontext(lambda _event: None)


class _Measured(NamedTuple):
    """Inputs for measuring cells, and the file with their records (see `measure_all`)."""

    records: Mapping[tuple[str, str], CellRecord]
    results: Path
    out: Path
    data_dir: Path | None
    budget: TimeBudget
    show: Show
    say: Callable[[str], object]
    again: bool

    def work_through(self, todo: Sequence[Cell], *, join: bool) -> bool:
        """Run every cell that no other process is running. Return True if all cells ended.

        With `join`, repeat this until no cells remain.
        """
        claims, missing, budgets = Claims(self.out / WORK_FOLDER), set[str](), dict[str, GradientBudget]()
        with interruptible() as interrupted:
            while todo:
                left_open = list[Cell]()
                for cell in todo:
                    if self.budget.left <= 0 or interrupted():
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
        """Return True if this process can hold a cell until the stack is closed."""
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
        """Run a cell unless another process has recorded it in the meantime.

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
    """A cell with its folder and the inputs of its runs."""

    cell: Cell
    folder: Path
    data_dir: Path | None
    budget: TimeBudget
    show: Show
    gradients: GradientBudget | None
    """Gradients of the setup, or None for equal rounds."""

    def record(self, before: CellRecord | None, first: CellRecord | None, *, again: bool) -> CellRecord | None:
        """Return the record of the cell, or None if interrupted.

        Args:
            before: earlier record of the cell.
            first: record of the cell at equal rounds, if this cell is at equal gradients.
            again: True for a second look at the earlier record.

        Raises:
            DataError: the data are missing.
        """
        if again and before:
            return self.look_again(before)
        return self.reuse(first) or self.confirm(before) or self.measure()

    def reuse(self, first: CellRecord | None) -> CellRecord | None:
        """Return the record of a cell at equal gradients whose runs are the same as its runs at equal rounds.

        Return None for other cells.
        """
        if self.gradients is None:
            return None
        with summaries.count_spent_time(self.folder, "planned"):
            try:
                alike = self.gradients.alike(self.cell, first)
            except ConfigError:  # `measure` has its sentence
                return None
        reason = "FedAvg's gradients at equal rounds, so the same runs"
        return new_record(self.cell, REUSED_STATUS, reason, self._minutes("planned")) if alike else None

    def measure(self) -> CellRecord | None:
        """Run the missing parts of the cell and return its record, or None if interrupted."""
        cell = self.cell
        with summaries.count_spent_time(self.folder, "cell") as note:
            listeners = (self.budget, lambda _event: note())
            try:
                finding = self._search(listeners) if cell.setup.trials > 1 else None
                chosen = dict(finding.best.params) if finding and finding.best else {}
                fields = self._run(cell.setup.seeds, chosen, listeners) if finding is None or finding.best else {}
            except ConfigError as refused:
                return new_record(cell, NOT_APPLICABLE, str(refused).removeprefix(f"{cell.where}: "), 0.0)
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
        """Return the renewed record of an earlier commit, or None if its first seed gives different values.

        The values must agree to the last digit.
        """
        if record is None or record.status != DONE_STATUS or record.digest != self.cell.digest:
            return None
        first = self.cell.setup.seeds[:1]
        with summaries.count_spent_time(self.folder, "confirmed") as note:
            fields = self._run(first, record.chosen, (self.budget, lambda _event: note()))
        same = fields is not None and fields["seeds"].items() <= record.seeds.items() and len(fields["seeds"]) == 1
        return replace(record, source=self.cell.source) if same else None

    def _search(self, listeners: tuple[Listener, ...]) -> SearchResult:
        """Return every trial, and the best trial."""
        from fedloom.lab.tune import Tuning

        cell = self.cell
        place = self.folder / f"tune-{cell.digest.partition('-')[0]}-{cell.source}"  # more trials may come
        tuning = Tuning(cell.search, cell.where, place, self.data_dir)
        with self.show(tuning.rounds) as tell:
            (finding,) = tuning.run(lambda *_: None, tell, *listeners, tuned=False)
        return finding

    def look_again(self, record: CellRecord) -> CellRecord | None:
        """Return the record of a second look with different seeds and the chosen settings, or None if interrupted."""
        with summaries.count_spent_time(self.folder, "again") as note:
            fields = self._run(self.cell.setup.again, record.chosen, (self.budget, lambda _event: note()))
        if fields is None:
            return None
        return replace(record, again=fields["seeds"], minutes=round(record.minutes + self._minutes("again"), 3))

    def run_fields(self, seeds: Sequence[int], chosen: Mapping[str, object]) -> dict[str, Any] | None:
        """Run seeds with the given settings. Return the record's fields, or None if interrupted."""
        return self._run(seeds, chosen, (self.budget,))

    def _minutes(self, what: str) -> float:
        return summaries.spent(self.folder)[what] / 60

    def _run(
        self, seeds: Sequence[int], chosen: Mapping[str, object], listeners: tuple[Listener, ...]
    ) -> dict[str, Any] | None:
        """Run the seeds and return the record's fields, or None if interrupted."""
        if self.gradients is None:
            return self._play(seeds, chosen, listeners)
        fields: dict[str, Any] = {}
        for seed in seeds:  # what the budget buys depends on how the seed draws the clients
            of_seed = self._buy(self.gradients, seed, chosen, listeners)
            if of_seed is None:
                return None
            lost = fields.get("reason") or of_seed["reason"]
            fields = {**of_seed, **fields, "seeds": fields.get("seeds", {}) | of_seed["seeds"], "reason": lost}
        return fields

    def _buy(
        self, budget: GradientBudget, seed: int, chosen: Mapping[str, Any], listeners: tuple[Listener, ...]
    ) -> dict[str, Any] | None:
        """Run as many rounds as a budget allows. Return the fields, or None if interrupted.

        If the first plan fails, a new plan is made.
        """
        try:
            rounds = budget.rounds(self.cell, chosen, seed)
        except RunStopped as stopped:
            return {"seeds": {}, "reason": f"seed {seed} without a result: {stopped}"}
        fields = self._play((seed,), chosen, listeners, rounds=rounds)
        spent = [series.gradients[-1] for series in fields["seeds"].values()] if fields else []
        if any(budget.missed(samples, seed) for samples in spent):
            again = budget.rounds(self.cell, chosen, seed, whole=True)
            return fields if again == rounds else self._play((seed,), chosen, listeners, rounds=again)
        return fields

    def _play(
        self, seeds: Sequence[int], chosen: Mapping[str, Any], listeners: tuple[Listener, ...], **more: int
    ) -> dict[str, Any] | None:
        """Run a method with the chosen settings and with ``more``.

        Return the record's fields, or None if interrupted.
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
        fields = series_of(read_runs([place])[0], cell.method, seeds)
        lost = [outcome for outcome in outcomes if str(outcome.seed) not in fields["seeds"]]
        note = f"{len(lost)} of {len(outcomes)} seeds without a result: {lost[0].reason}" if lost else ""
        return {**fields, "reason": note}


def estimates(
    setups: Iterable[Setup],
    todo: Sequence[Cell],
    records_by_cell: Mapping[tuple[str, str], CellRecord],
    data_dir: Path | None,
    protocol: Protocol = "rounds",
) -> list[dict[str, Any]]:
    """Return a row for each setup: recorded cells, due cells, and core-minutes estimated from measured cells."""
    rows = []
    for setup in setups:
        records = [record for (name, _), record in records_by_cell.items() if name == setup.name]
        cells_of_setup = [cell for cell in todo if cell.setup is setup]
        spent, searched = sum(r.minutes for r in records), setup.trials if setup.trials > 1 else 0
        runs, share = searched * len(setup.tuning) + len(setup.seeds), setup.decide_share(protocol)
        row = {"setup": setup.name, "clients": setup.title, "recorded": len(records), "due": len(cells_of_setup),
               "trials": setup.trials, "minutes so far": round(spent, 1), "share": share}  # fmt: skip
        rows.append(row)
        try:
            plan = parse({**setup.document, "method": [{"algorithm": "fedavg"}]}, setup.name)
            fed = plan.partition(plan.source.read(data_dir), setup.seeds[0])
        except DataError:
            rows[-1] = {**row, "note": "data missing"}
            continue
        done = [record for record in records if record.status == DONE_STATUS]
        guessed = sum(_minutes(Cell(setup, r.method, r.space, protocol), fed) for r in done) * runs
        factor = sum(r.minutes for r in done) / guessed if guessed else 1.0
        each = factor * sum(_minutes(cell, fed) for cell in cells_of_setup)
        row["estimate"] = round(each * runs, 1)
        fit = int(((share - spent) / each - len(setup.seeds)) / len(setup.tuning)) if each else setup.trials
        if fit < setup.trials:
            row["note"] = f"beyond its share; {max(0, fit)} trials would fit"
    return rows


def _minutes(cell: Cell, fed: Federation) -> float:
    """Return the estimated core-minutes for one run of a cell, in a trial or with a fresh seed.

    0 if it is not applicable.

    At equal gradients, every method takes as long as FedAvg.
    """
    try:
        plan = cell.plan if cell.protocol == "rounds" else Cell(cell.setup, "fedavg").plan
    except FedloomError:
        return 0.0
    data = Nominal(0, 0, tuple(fed.data.x.shape[1:]), max(2, len(fed.data.classes)))
    samples = float(fed.sizes("train").sum()) / fed.n
    return plan.common.rounds * per_round(plan, plan.methods[0], data, fed.n, samples) / 60
