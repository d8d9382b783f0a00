"""What a model is trained for: losses with closed-form gradients, predictions, metrics of every client; own objectives."""

from fedloom.tasks.kinds import Binary, Classification, Regression, Task
from fedloom.tasks.objective import Chosen, Objective, number, task_of

__all__ = ["Binary", "Chosen", "Classification", "Objective", "Regression", "Task", "number", "task_of"]
