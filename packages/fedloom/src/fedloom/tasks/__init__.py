"""Tasks: kinds of targets, with their losses, predictions, metrics and custom objectives."""

from fedloom.lazy import lister
from fedloom.tasks.chosen import Chosen, compute_user_number, task_of
from fedloom.tasks.kinds import Binary, Classification, Count, MultiLabel, Regression, Task
from fedloom.tasks.objective import Objective
from fedloom.tasks.survival import Survival

__all__ = [
    "Binary", "Chosen", "Classification", "Count", "MultiLabel", "Objective", "Regression", "Survival", "Task",
    "compute_user_number", "task_of",
]  # fmt: skip

__dir__ = lister(__name__)
