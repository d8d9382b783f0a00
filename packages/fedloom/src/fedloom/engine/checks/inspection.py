"""Inspection of single clients after the last round: what the federation cannot show is known before the first."""

from __future__ import annotations

from fedloom.data.dataset import Dataset
from fedloom.data.federation import Federation
from fedloom.data.groups import groups_of
from fedloom.data.tables import Table
from fedloom.engine.setting import Evaluate
from fedloom.errors import ConfigError, Refused

INSPECTIONS = ("confusion", "tsne", "groups", "predictions", "importance", "references", "cox")
"""Keys of [evaluate] that `fedloom.lab` computes after the last round; `simulate` alone does not."""

MAX_OUTPUTS = 64
"""Outputs of a sample whose prediction is kept."""

MIN_TSNE_SAMPLES = 5
"""Test samples of a client that t-SNE needs."""

MIN_PERMUTED_SAMPLES = 10
"""Test samples of a client in which columns are permuted."""


def check_inspection(evaluate: Evaluate, fed: Federation) -> None:
    """Refuse what the federation cannot show.

    Raises:
        Refused: confusion counts of a task without classes, predictions of too many outputs, columns of what is no
            table, reference models of times or counts, or too few test samples.
        ConfigError: t-SNE of a client that is not there, or groups by a column that was not kept.
    """
    data, sizes = fed.data, fed.sizes("test")
    if data.name == "blank":  # the server of a deployment has no samples: every site checks its own
        return
    if evaluate.confusion and not data.classed:
        raise Refused(
            f"evaluate.confusion counts predicted classes, but {data.name} is a {data.task}",
            rule="confusion-needs-classes",
            fix="leave {evaluate.confusion} out",
        )
    groups_of(data, evaluate.groups)
    if evaluate.predictions and (data.each or data.outputs > MAX_OUTPUTS):
        raise Refused(
            f"evaluate.predictions keeps at most {MAX_OUTPUTS} outputs of a sample",
            rule="predictions-too-many",
            fix="leave {evaluate.predictions} out",
        )
    unknown = [i for i in evaluate.tsne if i >= fed.n]
    if unknown:
        raise ConfigError(
            f"evaluate.tsne names client {unknown[0]}, but there are clients 0 to {fed.n - 1} only",
            rule="tsne-client-missing",
            fix="leave {evaluate.tsne} out, or name clients that are there",
        )
    if evaluate.tsne and all(int(sizes[i]) < MIN_TSNE_SAMPLES for i in evaluate.tsne):
        raise Refused(
            f"evaluate.tsne needs {MIN_TSNE_SAMPLES} test samples of a client, and none of these clients has so many",
            rule="tsne-too-few-samples",
            fix="leave {evaluate.tsne} out, or name clients with more test samples",
        )
    if evaluate.importance:
        check_permutable(fed)
        if int(sizes.max()) < MIN_PERMUTED_SAMPLES:
            raise Refused(
                f"evaluate.importance needs {MIN_PERMUTED_SAMPLES} test samples of a client, and no client has so many",
                rule="importance-too-few-samples",
                fix="leave {evaluate.importance} out",
            )
    if evaluate.references:
        check_references(fed)
    if evaluate.cox is not None:
        check_cox(data)


def check_permutable(fed: Federation) -> Table:
    """Return the table whose columns are permuted.

    Raises:
        Refused: the samples are no rows of a table.
    """
    if fed.data.fitted is None:
        raise Refused(
            f"evaluate.importance permutes columns of a table, and {fed.data.name} is none",
            rule="importance-needs-a-table",
            fix="leave {evaluate.importance} out",
        )
    return fed.data.fitted.table


def check_references(fed: Federation) -> None:
    """Refuse data that the reference models do not take.

    Raises:
        Refused: the samples are no rows of a table, or their targets are times or counts.
    """
    if fed.data.fitted is None or fed.data.task in ("survival", "count"):
        raise Refused(
            f"evaluate.references fits models to classes or measurements of a table, and {fed.data.name} has "
            f"targets of a {fed.data.task}",
            rule="references-need-a-table",
            fix="leave {evaluate.references} out",
        )


def survival_table(data: Dataset) -> Table:
    """Return the table of a survival task.

    Raises:
        Refused: the samples are no rows of a table, or their targets are no times.
    """
    table = data.prepare if data.fitted is None else data.fitted.table
    if data.task != "survival" or not isinstance(table, Table):
        raise Refused(
            f"evaluate.cox is of times to an event in a table, and {data.name} has none",
            rule="cox-needs-times",
            fix="leave {evaluate.cox} out",
        )
    return table


def check_cox(data: Dataset) -> None:
    """Refuse data that no Cox regression can be of.

    Raises:
        Refused: see `survival_table`; or a common test set, whose rows are no client's.
    """
    survival_table(data)
    if data.test is not None:
        raise Refused(
            f"evaluate.cox is over the rows of clients, and {data.name} has a common test set",
            rule="cox-with-a-common-test-set",
            fix="leave {evaluate.cox} out",
        )
