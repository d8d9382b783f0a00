"""Display of a value's options in Python: signatures, and `help` with each option's type, range and default."""

from __future__ import annotations

import collections.abc
import inspect
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # pydantic's metaclass has no public name

ARGS_HEADING = "Args:"
"""Heading above the lines on the options in a docstring."""
FIELD_LIMITS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
"""Bounds of a number in a pydantic field, with the symbols that represent them."""


class OptionsMeta(ModelMetaclass):
    """Metaclass that shows the options of a value's class in `help`, signatures and notebooks.

    Pydantic completes a class when it is first used. After that, the signature of the class shows validators instead of
    types. The signature and the docstring are computed only when they are read, so that importing a class remains fast.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature with the options as keyword parameters, with plain types and defaults."""
        parameters = []
        for name, field in get_options(cls).items():
            kind, default = plain_type(field.annotation), inspect.Parameter.empty
            if not field.is_required():
                default = field.get_default(call_default_factory=True)
                kind += " | None" if default is None and "None" not in kind else ""
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Plain(kind))
            )
        return inspect.Signature(parameters)

    @__signature__.setter
    def __signature__(cls, value: object) -> None:
        """Ignore the assigned value, because pydantic sets a signature after it has created the class."""

    @property
    def __doc__(cls) -> str | None:
        """Docstring of the class, plus one line per option."""
        text = cls.__dict__.get("__doc__")
        options = get_options(cls) if cls.__dict__.get("__pydantic_fields__") else {}
        if not options or (isinstance(text, str) and f"\n{ARGS_HEADING}" in text):
            return text
        lines = [f"    {name}: {describe_option(field)}" for name, field in options.items()]
        return "\n".join([inspect.cleandoc(text or ""), "", ARGS_HEADING, *lines])

    @__doc__.setter
    def __doc__(cls, value: str | None) -> None:
        type.__dict__["__doc__"].__set__(cls, value)


class Plain(str):
    """Type that is given as text, so that a signature shows it without quotes."""

    def __repr__(self) -> str:
        return str(self)


def plain_type(annotation: object) -> str:
    """Return a type in the notation that users know, without validators.

    >>> plain_type(Annotated[float, "more than 0"]), plain_type(tuple[int, ...] | None), plain_type(Literal["a", "b"])
    ('float', 'tuple[int, ...] | None', "'a' | 'b'")
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plain_type(inner[0])
    if origin is Literal:
        return " | ".join(map(repr, inner))
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(plain_type, inner)))
    if origin is collections.abc.Callable:
        return "function"
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        return f"{name.lower() if name == 'Tuple' else name}[{', '.join(map(plain_type, inner))}]"
    if annotation is Ellipsis:
        return "..."
    if annotation is NoneType:
        return "None"
    return str(getattr(annotation, "__name__", annotation))


def get_limits(field: FieldInfo) -> list[str]:
    """Return the range of an option, such as ``["> 0", "<= 1"]``."""
    return [
        f"{sign} {getattr(limit, name)}"
        for limit in field.metadata
        for name, sign in FIELD_LIMITS
        if hasattr(limit, name)
    ]


def get_options(kind: Any) -> dict[str, FieldInfo]:
    """Return the fields of a class that a caller can set: all except the fixed name of the class's kind."""
    return {
        name: field
        for name, field in kind.model_fields.items()
        if not (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1 and name == "kind")
    }


def describe_option(field: FieldInfo) -> str:
    """Return the type, the range and the default of an option, and its description."""
    kind, default = plain_type(field.annotation), field.get_default(call_default_factory=True)
    if field.is_required():
        value = "required"
    else:  # None means that the run derives a number
        value = "derived by default" if default is None and "None" not in kind else f"default {default!r}"
    sentence = (field.description or "").rstrip(".")
    return f"{', '.join([kind, *get_limits(field), value])}. {sentence[:1].upper()}{sentence[1:]}."
