"""What a broken law is reported as: the law, the part, the place in its code, and a cure."""

from __future__ import annotations

import traceback
from collections.abc import Collection

from fedloom.errors import cause_of
from fedloom.rows.layout import Layout


def stage_of(error: BaseException, part: type, stages: Collection[str]) -> str | None:
    """Name the function of a part in which an error arose: the outermost of ``stages`` called on a ``part``.

    Args:
        error: caught, with its traceback.
        part: base class of the part.
        stages: functions of the part that its author may write.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in stages and isinstance(frame.f_locals.get("self"), part):
            return frame.f_code.co_name
    return None


def broken(law: str, part: object, error: Exception, stage: str | None, cure: str, where: str = "") -> AssertionError:
    """Return the error of a law that is broken.

    Args:
        law: its name.
        part: which breaks it.
        error: what it was caught as; the law's own sentence is an `AssertionError`.
        stage: the function of the part that crashed; None where the law itself found the fault.
        cure: what to do about it.
        where: on which problem the law was checked, with a blank before it.
    """
    what = str(error) if isinstance(error, AssertionError) else f"stopped with {cause_of(error)}"
    what = what if stage is None else f"{stage} stopped with {cause_of(error)}"
    return AssertionError(f"law {law}{where}, {part!r}: {what}; {cure}")


def model_of_laws(layout: Layout, classes: int | None) -> str:
    """Say what a method that crashes must know of the model that it crashed on, a network of ``classes`` if any."""
    shapes = zip(layout.names, layout.shapes, strict=True)
    parameters = ", ".join(f"{name} {[*shape]}" for name, shape in shapes)
    if classes is not None:
        return f"the network has {classes} classes and the parameters {parameters}"
    return (
        f"the law's model has the parameters {parameters}; for a method that needs another head, such as one with an "
        "output per class, give layout=MODULE and the shape= of its samples"
    )
