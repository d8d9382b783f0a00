"""advise: recommend a method and its settings for clients defined in Python."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Unpack

from fedloom.data.dataset import default_to_cpu
from fedloom.engine.setting import Choices, GivenModel
from fedloom.errors import ConfigError, RunDirError, adapt_wording, report_exit
from fedloom.lab.advise.answer import Advice
from fedloom.lab.advise.race import AVERAGE_METHOD, DEFAULT_BUDGET_RUNS
from fedloom.lab.comparison.given import GivenExperiment
from fedloom.lab.experiment.units.executors import Executor
from fedloom.lab.progress import print_remark
from fedloom.lab.report.comparison.pairs import check_margin
from fedloom.rundir import as_path
from fedloom.values import check_type


@default_to_cpu()
@adapt_wording("python")
@report_exit()
def advise(
    data: object,
    model: GivenModel | None = None,
    *,
    partition: object = None,
    budget: float = DEFAULT_BUDGET_RUNS,
    margin: float | None = None,
    tune: Mapping[str, Any] | None = None,
    folder: Path | str | None = None,
    join: bool = False,
    executor: Executor | None = None,
    progress_bar: bool = True,
    name: str = "advice",
    **choices: Unpack[Choices],
) -> Advice:
    """Run a race between a small portfolio of methods on the given clients, and recommend a method.

    The race uses only training and validation data. The reported gains are measured on validation data that the race
    did not use.

    Args:
        data: a federation, a data set, the name of a data set, arrays or clients, as in `fedloom.compare`.
        model: model to train, as in `fedloom.simulate`. If None, softmax regression is used.
        partition: rule that splits a data set across clients.
        budget: compute budget of the race, in multiples of the gradients of one FedAvg run with all ``rounds``.
        margin: largest difference that does not matter in practice, in the metric's units (0.01 is one percentage point
            of accuracy). If None, no margin is stated.
        tune: the keys ``metric`` and ``space`` of the table ``[tune]`` in an experiment file.
        folder: directory of the race. Calling the function again with the same folder resumes the race. If None, a
            temporary directory is used.
        join: True to share the race with other processes that make the same call on the same folder.
        executor: executor that executes the runs, with a method ``submit(function, *arguments)``, as in
            `fedloom.compare`.
        progress_bar: True to print a line to standard error after every comparison.
        name: name of the experiment file written for the final comparison.
        choices: other fields of `fedloom.Setting` that apply to all methods, such as ``rounds=50`` or ``local={"lr":
            0.1}``. ``seed`` is used for the split and for the first run of each method.

    Returns:
        The advice. Its ``lines`` method returns the advice as sentences.

    Raises:
        ConfigError: a value is invalid. Nothing has been run.
        DataError: the data cannot be converted to a data set.
        RunDirError: the folder belongs to a different race.
        RunStopped: the race was interrupted, or no method has a result.
    """
    if find_spec("optuna") is None:
        raise ConfigError("advise: Optuna is needed: pip install 'fedloom[tune]'")
    from fedloom.lab.advise.advisor import Advisor

    check_type("advise: join", join, bool)
    check_type("advise: progress_bar", progress_bar, bool)
    check_type("advise: tune", tune, Mapping, type(None))
    if join and folder is None:
        raise ConfigError("advise: `join` needs a shared folder. Name a folder that all processes can use")
    place = None if folder is None else as_path(folder, "advise: folder")
    if "seeds" in choices:
        raise ConfigError(
            "advise: a race chooses the seeds of its runs itself. Pass `seed`, the seed of the split "
            "and of the first run"
        )
    seed = choices.pop("seed", 0)
    keywords = ["seeds", *(keyword for keyword in signature(advise).parameters if keyword != "choices")]
    definition = GivenExperiment(
        [AVERAGE_METHOD], data, partition, [seed], dict(tune or {}), name, {"model": model, **choices}, (), keywords,
        call="advise",
    )  # fmt: skip
    temporary = None if place is not None else Path(mkdtemp(prefix="fedloom-"))
    out = temporary / "race" if temporary is not None else place
    assert out is not None
    tell = print_remark if progress_bar else _ignore_line
    try:
        advisor = Advisor(
            definition.document, "advise", out, budget=budget, margin=check_margin(margin), read=definition.read
        )
        tell(advisor.plan)
        return advisor.run(tell, join=join, executor=executor)
    except RunDirError as error:
        raise RunDirError(str(error).replace("Choose another --out", "Choose another folder")) from None
    finally:
        if temporary is not None:
            rmtree(temporary, ignore_errors=True)


def _ignore_line(_line: str) -> None:
    """Ignore a progress line."""
