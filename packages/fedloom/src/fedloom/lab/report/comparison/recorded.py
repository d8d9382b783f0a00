"""Recorded comparison: tables, tests, LaTeX, charts and a report, computed from a run directory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import pyarrow as pa

from fedloom.errors import ConfigError
from fedloom.formats import as_pandas, format_p_value, format_pair
from fedloom.hints import unknown_name_error
from fedloom.lab.report import notebook as display
from fedloom.lab.report.charts import look
from fedloom.lab.report.comparison.conclusion import conclude_groups
from fedloom.lab.report.comparison.contenders import Models, default_baseline, select_contenders
from fedloom.lab.report.comparison.pairs import Pair, check_margin, compare_pairs, pairs_latex
from fedloom.lab.report.comparison.paper import experiment_names, results_latex
from fedloom.lab.report.comparison.plots import Blocks, MethodNames, client_chart, curve_chart, rank_chart
from fedloom.lab.report.naming import describe_figure, lowercase_title, titled
from fedloom.lab.report.numbers import Row, leading_metric, method_rows
from fedloom.lab.report.page import write_report
from fedloom.lab.report.reading import read_runs
from fedloom.lab.report.run import Run
from fedloom.lab.report.tables import cell_text, make_arrow_table, write_difference
from fedloom.rundir import as_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from altair import LayerChart


class RecordedComparison:
    """Comparison of methods, read from a run directory.

    Args:
        folder: path of the run directory.
        baseline: label of the method to which all others are compared. If None, the baseline is the first method
            without federation, else FedAvg, else the first method.
        compare_model: which model of each method is compared (see `fedloom.lab.report.comparison.contenders.Models`).
        margin: largest difference in the primary metric that does not matter in practice, in the metric's units (0.01
            is one percentage point of accuracy). Methods are reported as equivalent if their difference is within the
            margin. If None, equivalence is not tested.

    Raises:
        RunDirError: the folder is not a run directory, or cannot be read.
        ConfigError: the method does not exist, or the margin is not a number above 0.
    """

    def __init__(
        self,
        folder: Path | str,
        baseline: str | None = None,
        compare_model: Models = "best-on-validation",
        margin: float | None = None,
    ) -> None:
        self.folder, self.compare_model, self.margin = Path(folder), compare_model, check_margin(margin)
        self.baseline = baseline or default_baseline(self._rows) or self._rows[0].name
        self._pairs(self.baseline)

    def table(self) -> pa.Table:
        """Return a table with one row per method: means over seeds, half-widths of 95 % intervals (``_ci95``), status.

        The table has the same columns as ``results.csv`` (see `fedloom.lab.report.result_table`). If hybrid models are
        compared, the table also contains their rival: for each client, the better of local training and FedAvg on
        validation data.
        """
        return make_arrow_table(select_contenders(self._runs, self._rows, self.compare_model))

    def significance(
        self, baseline: str | None = None, figure: str | None = None, margin: float | None = None
    ) -> pa.Table:
        """Test each method against a baseline in one family of paired tests over seeds.

        Return a table with the best method first.

        Args:
            baseline: label of the method to which the others are compared. If None, the comparison's baseline is used.
            figure: name of the metric to compare, such as ``accuracy`` or ``accuracy/worst10``. If None, this is the
                primary metric.
            margin: largest difference in the metric that does not matter in practice. For metrics that are compared as
                ratios, the logarithm of the largest ratio that does not matter.

        Returns:
            Columns method, model, reference, seeds, mean, reference_mean, difference (method minus reference; for costs
            and variances the logarithm of their ratio, see the column scale), half_width (of the deciding interval,
            which excludes 0 if and only if the difference is significant), p (paired t test), p_holm (Holm's
            correction), scale, margin, verdict (better, worse, equivalent, inconclusive or not tested), and the reason
            if the difference is not tested: same models, or fewer than five seeds.

        Raises:
            ConfigError: the method or metric does not exist, there is no second method, or the margin is not a number
                above 0.
        """
        compared = self._run_tests(baseline, figure, check_margin(margin))
        records = [{k: v for k, v in pair.record().items() if k != "run"} for pair in compared]
        return pa.table({name: [record[name] for record in records] for name in records[0]})

    def latex(self, columns: Sequence[str] | None = None) -> str:
        """Render the results as a LaTeX table for a paper.

        The best method is in bold, and methods that are not significantly worse are marked with a dagger.

        Args:
            columns: names of the columns in `table`. If None, up to six columns are chosen to suit the task.
        """
        return results_latex(self._runs, self._rows, columns, self.compare_model)

    def significance_latex(self, baseline: str | None = None) -> str:
        """Render the result of `significance` as a LaTeX table for a paper.

        Raises:
            ConfigError: the method does not exist, or there is no second method.
        """
        return pairs_latex(self._run_tests(baseline), experiment_names(self._runs))

    def report(self, out: Path | str | None = None) -> Path:
        """Write the offline HTML report and return its path.

        A folder next to it contains ``results`` and ``pairs`` as CSV and LaTeX files.

        Args:
            out: path of the HTML file. If None, the file is ``report.html`` in the folder of the comparison.

        Returns:
            The path of the HTML file.
        """
        place = self.folder / "report.html" if out is None else as_path(out, "out")
        return write_report(
            [self.folder],
            place,
            baseline=self.baseline,
            compare_model=self.compare_model,
            margin=self.margin,
            charts=False,
        )

    def plot(self, name: str | None = None) -> LayerChart:
        """Plot every method's mean with its 95 % interval over seeds, and a dot for every seed.

        Args:
            name: name of the metric. If None, the task's primary metric is plotted.

        Raises:
            ConfigError: the metric does not exist.
        """
        chosen = name or self._lead
        estimates = {r.method: r.figures[chosen] for r in select_contenders(self._runs, self._rows, self.compare_model)
                     if chosen in r.figures}  # fmt: skip
        if not estimates:
            raise unknown_name_error("figure", chosen, {name: None for row in self._rows for name in row.figures})
        return display.comparison_chart(estimates, chosen)

    def curves(
        self,
        name: str | None = None,
        x: str = "round",
        *,
        width: int = 380,
        height: int = 240,
        labels: Mapping[str, str] | None = None,
    ) -> LayerChart:
        """Plot learning curves: every method's mean over clients, with the 95 % interval over seeds as a band.

        The chart's ``save`` method writes PDF, SVG and PNG files: ``comparison.curves().save("curves.pdf")``.

        Args:
            name: name of the metric. If None, the primary metric of the task is drawn.
            x: horizontal axis: ``round``, ``bytes``, ``samples_backward``, ``seconds`` or ``simulated_seconds``.
            width: width of the panel, in pixels.
            height: height of the panel, in pixels.
            labels: names to show in the figure, keyed by the label of the method. Only these methods are plotted, in
                the given order. If None, all methods are plotted.

        Raises:
            ConfigError: the metric, the axis or a method does not exist.
        """
        chart = curve_chart(self._runs, self._labels(labels), name or self._lead, x, width, height)
        return cast("LayerChart", look.make_notebook_chart(chart))

    def clients(
        self,
        name: str | None = None,
        *,
        width: int = 380,
        height: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> LayerChart:
        """Plot each client's mean over seeds with its 95 % interval, as one dot per method.

        Args:
            name: name of the metric. If None, the primary metric of the task is drawn.
            width: width of the panel in pixels.
            height: height of the panel in pixels. If None, the height depends on the number of clients and methods.
            labels: names to show in the figure, as in `curves`.

        Raises:
            ConfigError: the metric or a method does not exist.
        """
        chart = client_chart(self._runs, self._labels(labels), name or self._lead, width, height)
        return cast("LayerChart", look.make_notebook_chart(chart))

    def critical_difference(
        self,
        name: str | None = None,
        over: Blocks = "seeds",
        *,
        width: int = 380,
        height: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> LayerChart:
        """Plot the methods' mean ranks, with bars over methods that Nemenyi's test does not distinguish at level 0.05.

        Args:
            name: name of the metric. If None, methods are ranked by the primary metric.
            over: the blocks for ranking: "seeds", or "clients" (with their means over seeds). A run's clients are not
                independent, so rank differences over clients appear more certain than they are.
            width: width of the panel, in pixels.
            height: height of the panel, in pixels. If None, the height depends on the number of methods.
            labels: names to show in the figure, as in `curves`.

        Raises:
            ConfigError: there are fewer than three methods or five blocks, or the metric or a method does not exist.
        """
        if over not in get_args(Blocks):
            raise unknown_name_error("choice", over, get_args(Blocks), "critical_difference: over")
        chart = rank_chart(self._runs, self._labels(labels), name or self._lead, over, width, height)
        return cast("LayerChart", look.make_notebook_chart(chart))

    def _labels(self, labels: Mapping[str, str] | None) -> MethodNames:
        return MethodNames(
            [row for row in select_contenders(self._runs, self._rows, self.compare_model) if row.algorithm], labels
        )

    def to_pandas(self) -> Any:
        """Return `table` as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        return as_pandas(self.table())

    def _repr_html_(self) -> str:
        metric = lowercase_title(titled(describe_figure(self._lead)))
        heads = ["method", "model", f"test {metric}", f"difference to {self.baseline}", "Holm p", "verdict"]
        return display.html_table(heads, self._lines()) + display.draw_svg(self.plot())

    def __repr__(self) -> str:
        lines = [
            ", ".join([f"{m}: {value}", *([f"{d} to {self.baseline}"] if d else []), *([v] if v else [])])
            for m, _, value, d, _, v in self._lines()
        ]
        metric = lowercase_title(titled(describe_figure(self._lead)))
        conclusions = conclude_groups(self._runs, self._rows, self.baseline, self.compare_model, self.margin)
        ends = [line for one in conclusions for line in (one.answer, one.compared, one.cost) if line and one.compared]
        return "\n  ".join([f"Comparison({experiment_names(self._runs)}, test {metric})", *lines, *ends])

    def _lines(self) -> list[list[str]]:
        """Return a row of text cells for each method: method, model, mean, difference, Holm's p-value and verdict."""
        beside = {(pair.row.method, pair.row.model): pair for pair in self._pairs(self.baseline)}
        lines = []
        for row in select_contenders(self._runs, self._rows, self.compare_model):
            result, other = cell_text(self._lead, row.figures.get(self._lead)), beside.get((row.method, row.model))
            one = other.comparison if other else None
            gap = format_pair(*write_difference(self._lead, one.mean, one.half)) if one else ""
            holm = format_p_value(one.holm) if one and one.is_testable else ""
            lines.append([row.method, row.model, result, gap, holm, other.words if other else row.remark])
        return lines

    def _run_tests(self, baseline: str | None, name: str | None = None, margin: float | None = None) -> list[Pair]:
        if tests := self._pairs(baseline or self.baseline, name, margin):
            return tests
        raise ConfigError(f"{self.baseline} is the only method, so there is nothing to compare it with")

    def _pairs(self, baseline: str, name: str | None = None, margin: float | None = None) -> list[Pair]:
        if margin is None and name in (None, self._lead):
            margin = self.margin
        return compare_pairs(self._runs, self._rows, baseline, self.compare_model, name, margin)

    @cached_property
    def _runs(self) -> list[Run]:
        return read_runs([self.folder])

    @cached_property
    def _rows(self) -> list[Row]:
        return method_rows(self._runs)

    @cached_property
    def _lead(self) -> str:
        return leading_metric(self._runs)
