"""The charts of a report; colour means the model (global, personal, hybrid), never the method.

Where it means something else (classes, clusters), the caption says so.
"""

from __future__ import annotations

from fedloom.report.clients import client_pictures
from fedloom.report.clusters import cluster_picture
from fedloom.report.cost import cost_pictures
from fedloom.report.curves import curve_pictures
from fedloom.report.each_client import each_client_picture
from fedloom.report.figure import Figure
from fedloom.report.inspection import inspection_pictures
from fedloom.report.numbers import Row, leading_metric
from fedloom.report.partition import partition_pictures
from fedloom.report.reading import Run
from fedloom.report.robustness import robustness_pictures
from fedloom.report.scatter import fairness_pictures, sparsity_picture
from fedloom.report.spread import relative_picture, spread_picture


def figures(runs: list[Run], rows: list[Row]) -> list[Figure]:
    """Every chart that the recorded figures allow."""
    lead = leading_metric(runs)
    found = [
        spread_picture(runs, rows, lead),
        *client_pictures(runs, rows, lead),
        each_client_picture(runs, rows, lead),
        relative_picture(runs, rows),
        *inspection_pictures(runs),
        *fairness_pictures(runs, rows, lead),
        *robustness_pictures(runs, rows, lead),
        cluster_picture(runs, rows),
        sparsity_picture(runs, rows, lead),
        *curve_pictures(runs, rows, lead),
        *cost_pictures(runs, rows, lead),
        *partition_pictures(runs),
    ]
    return [figure for figure in found if figure is not None]
