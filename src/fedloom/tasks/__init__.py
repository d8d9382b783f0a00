"""What a model is trained for and scored by: losses, predictions, metrics of every client; a user's own objective."""

from fedloom.tasks.kinds import Binary, Classification, Regression, Task
from fedloom.tasks.objective import Chosen, Objective, number, task_of

__all__ = ["Binary", "Chosen", "Classification", "Objective", "Regression", "Task", "number", "task_of"]
