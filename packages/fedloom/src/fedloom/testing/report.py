"""Reports on violated laws, which name the law, the part, the location in the part's code, and a fix."""

from __future__ import annotations

import random  # noqa: TID251  # only to see whether it was used
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch

from fedloom.errors import ConfigError, describe_cause
from fedloom.hints import unknown_name_error
from fedloom.rows.layout import Layout
from fedloom.testing.scene import demand

PACKAGE_FOLDER = Path(__file__).parents[1]
"""Folder that contains the code of fedloom."""


def find_stage(error: BaseException, part: type, stages: Collection[str]) -> str | None:
    """Return the outermost function of a part that raised an error, preferably in the author's code, or None.

    Args:
        error: error that was caught, with its traceback.
        part: base class of the part.
        stages: names of the functions that the author of a part may write.
    """
    called = list[tuple[str, Path]]()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, part) and (stage := _stage_of_code(code, type(owner), stages)):
            called.append((stage, Path(code.co_filename)))
    by_author = [name for name, file in called if PACKAGE_FOLDER not in file.parents]
    return next(iter([*by_author, *(name for name, _ in called)]), None)


def _stage_of_code(code: CodeType, kind: type, stages: Collection[str]) -> str | None:
    """Return the name of the function in a class that has this code object, regardless of its original name."""
    if code.co_name in stages:
        return code.co_name
    return next((name for name in stages if getattr(getattr(kind, name, None), "__code__", None) is code), None)


def law_error(
    law: str, part: object, error: Exception, stage: str | None, cure: str, where: str = ""
) -> AssertionError:
    """Return the error that reports the violation of a law.

    Args:
        law: name of the law.
        part: part that violates the law.
        error: error that was caught. If the law itself raised this error, the error is an `AssertionError`.
        stage: function of the part that raised the error, or None if the law itself detected the violation.
        cure: advice on how to fix the violation.
        where: text that starts with a space and names the problem used for the check.
    """
    what = str(error) if isinstance(error, AssertionError) else f"stopped with {describe_cause(error)}"
    what = what if stage is None else f"{stage} stopped with {describe_cause(error)}"
    return AssertionError(f"law {law}{where}, {part!r}: {what}; {cure}")


def name_law(law: Callable[[Any], None]) -> str:
    """Return the name of a law, as it is used in `without` and in messages."""
    return law.__name__.lstrip("_")


def hold(
    laws: Mapping[Callable[[Any], None], str],
    subject: Any,
    part: object,
    base: type,
    without: Collection[str] = (),
    where: str = "",
) -> None:
    """Check that a part satisfies laws, one after another.

    Args:
        laws: the laws, each with the usual way to fix a violation.
        subject: argument of each law.
        part: value that is checked.
        base: base class of the kind of part.
        without: names of laws to omit.
        where: text that starts with a space and names the problem used for the checks.

    Raises:
        AssertionError: a law is violated. The message names the first such law, the part, the problem and the fix. If
            the part's code raised an error, the message names the function, the error, the file and the line.
    """
    stages = {name for name in dir(part) if not name.startswith("_")}
    for law, cure in laws.items():
        if name_law(law) in without:
            continue
        try:
            law(subject)
        except Exception as error:
            raise law_error(name_law(law), part, error, find_stage(error, base, stages), cure, where) from error


def check_arguments(
    part: object, base: type, example: str, laws: Collection[Callable[[Any], None]], without: Collection[str]
) -> None:
    """Raise an error if a part is not of the expected kind, or if a name does not belong to a law.

    Raises:
        ConfigError: the part is not of the expected kind, or a name is not the name of a law.
    """
    if not isinstance(part, base):
        raise ConfigError(f"{base.__name__.lower()} must be a value such as {example}, got {part!r:.80}")
    names = [name_law(law) for law in laws]
    for name in without:
        if name not in names:
            raise unknown_name_error("law", name, names)


@contextmanager
def generators_untouched() -> Iterator[None]:
    """Raise an error if code in the block draws from a global generator."""
    before = _global_states()
    yield
    for name, state in _global_states().items():
        demand(state == before[name], f"the global generator of {name} was used. Use the given generators")


def _global_states() -> dict[str, Any]:
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002  # only to see whether it was used
    return {
        "torch": torch.random.get_rng_state().tolist(),
        "numpy": repr(legacy["state"]["key"].tolist()) + repr(legacy["state"]["pos"]),
        "random": random.getstate(),
    }


def describe_law_model(layout: Layout, classes: int | None) -> str:
    """Return a sentence about the model that made a method fail. If ``classes`` is set, the model is a network."""
    shapes = zip(layout.names, layout.shapes, strict=True)
    parameters = ", ".join(f"{name} {[*shape]}" for name, shape in shapes)
    if classes is not None:
        return f"the network has {classes} classes and the parameters {parameters}"
    return (
        f"the test model has the parameters {parameters}. If the method needs a different head, such as one output per "
        "class, pass layout=MODULE and the shape= of its samples"
    )
