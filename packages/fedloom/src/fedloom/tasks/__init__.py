"""Tasks: kinds of targets, with their losses, predictions, metrics and custom objectives."""

from fedloom.lazy import make_dir
from fedloom.tasks.chosen import ChosenTask, compute_user_number, make_task
from fedloom.tasks.kinds import Binary, Classification, Count, MultiLabel, Regression, Task
from fedloom.tasks.objective import Objective
from fedloom.tasks.survival import Survival

__all__ = [
    "Binary", "ChosenTask", "Classification", "Count", "MultiLabel", "Objective", "Regression", "Survival", "Task",
    "compute_user_number", "make_task",
]  # fmt: skip

__dir__ = make_dir(__name__)
