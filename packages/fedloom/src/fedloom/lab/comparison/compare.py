"""compare: run several methods with several seeds on the same clients, and test and report the differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, NamedTuple, Unpack
from weakref import finalize

from fedloom.data.dataset import default_to_cpu
from fedloom.engine.result import Result
from fedloom.engine.setting import Choices, GivenModel
from fedloom.errors import ConfigError, RunDirError, RunStopped, Stop, adapt_wording, report_exit
from fedloom.hints import unknown_name_error
from fedloom.lab.comparison.given import GivenExperiment
from fedloom.lab.experiment import Plan
from fedloom.lab.experiment.events import Listener
from fedloom.lab.experiment.outputs import Outcome
from fedloom.lab.experiment.track import Tracker, check_tracker
from fedloom.lab.experiment.units.executors import Executor
from fedloom.lab.progress import count_progress, print_remark, show_progress
from fedloom.lab.report.comparison.contenders import COMPARED_MODELS, Models
from fedloom.lab.report.comparison.pairs import check_margin
from fedloom.lab.report.comparison.recorded import RecordedComparison
from fedloom.rundir import as_path
from fedloom.values import check_type, has_type, list_functions


class Comparison(RecordedComparison):
    """Result of `compare`: the recorded comparison, and the result of each run with its trained models.

    Attributes:
        folder: run directory with the same contents as one that `fedloom run` writes. It can also be opened with
            `fedloom.open_run`.
        results: results of the completed runs, keyed by (label, seed).
        failures: reason why a run has no result, keyed by (label, seed).
        chosen: settings chosen by the search, keyed by the method's label. Empty if there was no search.
    """

    def __init__(
        self,
        folder: Path,
        outcomes: Sequence[Outcome],
        baseline: str | None,
        compare_model: Models,
        chosen: Mapping[str, Mapping[str, object]],
        margin: float | None = None,
    ) -> None:
        super().__init__(folder, baseline, compare_model, margin)
        self.results: dict[tuple[str, int], Result] = {
            (one.label, one.seed): one.result for one in outcomes if one.result is not None
        }
        self.failures = {(one.label, one.seed): one.reason for one in outcomes if one.result is None}
        self.chosen = chosen

    def __repr__(self) -> str:
        lines = [f"{label}, seed {seed}: {sentence}" for (label, seed), sentence in self.failures.items()]
        return "\n  ".join([super().__repr__(), *lines])

    def __getitem__(self, key: tuple[str, int]) -> Result:
        if key not in self.results:
            keys = ", ".join(map(str, self.results))
            raise ConfigError(
                f"no result for {key!r}. Use a label and a seed from {keys}, as in comparison['fedavg', 0]"
            )
        return self.results[key]


@default_to_cpu()
@adapt_wording("python")
@report_exit()
def compare(
    methods: Mapping[str, object] | Sequence[object],
    data: object,
    model: GivenModel | None = None,
    *,
    partition: object = None,
    seeds: Iterable[int] = range(5),
    tune: int | Mapping[str, object] | None = None,
    baseline: str | None = None,
    compare_model: Models = "best-on-validation",
    margin: float | None = None,
    analyses: Sequence[object] = (),
    folder: Path | str | None = None,
    join: bool = False,
    executor: Executor | None = None,
    callbacks: Sequence[Listener] = (),
    track: str | None = None,
    progress_bar: bool = True,
    name: str = "comparison",
    **choices: Unpack[Choices],
) -> Comparison:
    """Run several methods with several seeds on the same clients, and return their comparison.

    Runs are paired: for a given seed, all methods use the same split, cohorts, initial model and batches. The call is
        equivalent to `fedloom tune` and `fedloom run` with an experiment file: the same code runs, resumes and reports
        it.

    Args:
        methods: methods to compare, keyed by label. Each value is a method (``fl.algorithms.Ditto(lam=1.0)`` or an
            instance of your own class), the name of a method, or a table with ``algorithm``, its options and settings
            for this method only: ``model``, ``task``, ``local``, ``rounds``, ``sampler``, ``aggregation_weights``,
            ``personalized_aggregation``, ``aggregator``, ``attack``, ``upload_transform``, ``schedule``. Methods in a
            list are labeled by their names.
        data: a federation, which is already split across clients. A data set, the name of a data set, arrays ``(x,
            y)``, and any other input of `fedloom.Dataset.create` are also accepted. A list that contains a pair
            ``(train, test)`` for each client, or any other input of `fedloom.Federation.create`, is treated as a
            federation.
        model: model to train, as in `fedloom.simulate`. If None, softmax regression is used.
        partition: rule that splits a data set across clients, such as ``fl.partitions.dirichlet(clients=20,
            alpha=0.1)``. The split is drawn again for each seed. A federation is already split, so seeds affect
            everything except the split.
        seeds: seeds of the runs. Every method is run once with each seed. With fewer than five seeds, differences are
            not tested. If the random choices of two methods do not affect their results for some seeds, their runs with
            these seeds only repeat other runs, and these seeds count as one.
        tune: number of trials per method. Settings are chosen on validation data before the runs, and all methods get
            the same compute budget. The table ``[tune]`` of an experiment file is also accepted. If None, the settings
            are used unchanged.
        baseline: label of the method to which the other methods are compared. If None, the baseline is local training
            or FedAvg, if one of them was run.
        compare_model: which model of each method is compared. ``best-on-validation`` is the model that a client would
            use (the better of the global and the personal model on the client's validation set), ``personal`` is the
            model that the papers report, and ``all`` compares every model.
        margin: largest difference that does not matter in practice, in the primary metric's units (0.01 is one
            percentage point of accuracy). Methods are reported as equivalent if their difference is within the margin.
            If None, equivalence is not tested.
        analyses: analyses to compute after the rounds, given as values, as names of `fedloom.analyses.ANALYSES` or as
            tables with ``kind``: ``["confusion", {"kind": "groups", "by": ["sex"]}]``. The report shows their results.
        folder: run directory. Calling the function again with the same folder resumes an interrupted comparison. A
            search for settings uses the folder ``<folder>-tune`` next to this folder. If None, a temporary directory is
            used.
        join: True to share the runs with other processes that make the same call on the same folder, on any machine
            that can access the folder. Every process returns the complete comparison.
        executor: executor that executes the runs. It is an object with a method ``submit(function, *arguments)``, such
            as Dask's ``Client.get_executor()``, submitit's executors or the executors of `concurrent.futures`. Your
            classes must be defined in modules that the workers can import. The data are sent to each worker once. Each
            method's search for settings is submitted as a single call.
        callbacks: functions called with an event (`fedloom.lab.experiment.events.Event`: label, seed, round, figures)
            after every round and at the end of every run. An exception in a callback is reported as a warning. To stop
            runs early, pass ``early_stop``.
        track: tracker that logs every run's metrics to ``folder``: ``"tensorboard"``, ``"mlflow"`` or ``"wandb"``.
        progress_bar: True to show progress on standard error: a bar in a terminal, or lines otherwise.
        name: name of the comparison, shown in titles.
        choices: other fields of `fedloom.Setting` that apply to all methods, such as ``rounds=50`` or ``local={"lr":
            0.1}``.

    Returns:
        The comparison, with every method's metrics, the tests, the trained models, and the report.

    Raises:
        ConfigError: a value is invalid, or values are incompatible (Refused). Nothing has been run.
        DataError: the data cannot be converted to a data set.
        RunDirError: the folder contains the results of a different comparison.
        RunStopped: the comparison was interrupted (the same call with the same folder resumes it), or no trial of a
            search was completed.
    """
    if tune is not None and find_spec("optuna") is None:
        raise ConfigError("compare: tune needs Optuna: pip install 'fedloom[tune]'")
    if not isinstance(tune, int | Mapping | None):
        raise ConfigError(f"compare: tune must be a number of trials or the [tune] table of a file, got {tune!r:.80}")
    check_type("compare: join", join, bool)
    check_type("compare: progress_bar", progress_bar, bool)
    if join and folder is None:
        raise ConfigError("compare: `join` needs a shared folder. Name a folder that all processes can use")
    callbacks = list_functions(callbacks, "compare: callbacks must be a list of functions of an event")
    if track is not None:
        check_tracker(track)
        if folder is None:
            raise ConfigError("compare: track writes into the run directory. Name a folder")
    hears = _RunListeners(tuple(callbacks), track)
    table = {"trials": tune} if isinstance(tune, int) else dict(tune or {})
    place = None if folder is None else as_path(folder, "compare: folder")
    check_margin(margin)
    if not has_type(compare_model, str) or compare_model not in COMPARED_MODELS:
        raise unknown_name_error("choice", compare_model, COMPARED_MODELS, "compare: compare_model")
    keywords = [keyword for keyword in signature(compare).parameters if keyword != "choices"]
    definition = GivenExperiment(
        methods, data, partition, seeds, table, name, {"model": model, **choices}, analyses, keywords
    )
    if baseline is not None and (not has_type(baseline, str) or baseline not in definition.references):
        raise unknown_name_error("method to compare with", baseline, definition.references, "compare: baseline")
    if place is not None:
        return _run_comparison(
            definition,
            place,
            (baseline, compare_model, margin),
            tune is not None,
            progress_bar,
            join=join,
            executor=executor,
            hears=hears,
        )
    temporary = Path(mkdtemp(prefix="fedloom-"))
    try:
        shown_as = (baseline, compare_model, margin)
        comparison = _run_comparison(
            definition, temporary / "run", shown_as, tune is not None, progress_bar, executor=executor, hears=hears
        )
    except BaseException:
        rmtree(temporary, ignore_errors=True)
        raise
    finalize(comparison, rmtree, temporary, ignore_errors=True)
    return comparison


class _RunListeners(NamedTuple):
    """Callbacks and tracker that receive every run's events."""

    callbacks: tuple[Listener, ...]
    track: str | None

    def listeners(self, plan: Plan, place: Path) -> tuple[Listener, ...]:
        """Return all functions that receive events of the runs in a directory."""
        if self.track is None:
            return self.callbacks
        return (*self.callbacks, Tracker(self.track, plan.experiment, place))


def _run_comparison(
    definition: GivenExperiment,
    place: Path,
    shown_as: tuple[str | None, Models, float | None],
    tunes: bool,
    progress_bar: bool,
    hears: _RunListeners,
    *,
    join: bool = False,
    executor: Executor | None = None,
) -> Comparison:
    """Execute the runs that are missing from a folder, and return the comparison stored there."""
    document, chosen = definition.document, dict[str, Mapping[str, Any]]()
    try:
        if tunes:
            document, chosen = _tune_document(
                definition, document, place.with_name(f"{place.name}-tune"), progress_bar, join, executor
            )
        plan = Plan(definition.read(document), place)
        for line in plan.remarks if progress_bar else ():
            print_remark(line)
        with show_progress(plan) if progress_bar else nullcontext(_ignore_event) as hear:
            outcomes = plan.run(hear, *hears.listeners(plan, place), page=False, join=join, executor=executor)
    except RunDirError as error:
        what, flag, _ = str(error).partition(". Choose another --out")
        seed = ". If the code has not changed, call torch.manual_seed before you create the module with random weights"
        drawn = seed if ": model.digest was " in what else ""
        raise RunDirError(f"{what}{drawn}. Choose another folder, or delete this one" if flag else what) from None
    if any(one.status == "interrupted" for one in outcomes):
        raise RunStopped(Stop.INTERRUPTED, "if you passed a folder, the same call resumes from it")
    if all(one.result is None for one in outcomes):
        first = outcomes[0]
        raise RunStopped(Stop.FAILED, f"no run has a result; {first.label}, seed {first.seed}: {first.reason}")
    baseline, compare_model, margin = shown_as
    return Comparison(place, outcomes, baseline, compare_model, chosen, margin)


def _tune_document(
    definition: GivenExperiment,
    document: dict[str, Any],
    out: Path,
    progress_bar: bool,
    join: bool,
    executor: Executor | None,
) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
    """Return the experiment document with the settings chosen by a search, and these settings keyed by method label."""
    from fedloom.lab.tune import Tuning  # needs the extra 'tune'
    from fedloom.lab.tune.search import note_limits, report_overspending

    search = Tuning(document, "compare", out, read=definition.read)
    shows: AbstractContextManager[Listener] = (
        count_progress(search.rounds) if progress_bar else nullcontext(_ignore_event)
    )
    with shows as hear:
        findings = search.run(lambda *_: None, hear, join=join, executor=executor)
    for sentence in (
        (*(f"warning: {one}" for one in report_overspending(findings)), *note_limits(findings)) if progress_bar else ()
    ):
        print_remark(sentence)
    return search.tuned(findings), {one.study.method.label: dict(one.best.params) for one in findings if one.best}


def _ignore_event(event: object) -> None:
    """Ignore an event."""
