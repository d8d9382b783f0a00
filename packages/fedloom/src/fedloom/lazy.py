"""Import the public names of a package when they are first touched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

DISPLAY_MODULE = "fedloom.lab.report.notebook"
"""The module that draws results for people. The library imports no module of the lab, so it has the name alone."""


def display() -> Any:
    """Import the module that draws results, which is slow and needed by people only."""
    return import_module(DISPLAY_MODULE)


def getter(
    package: str, places: Mapping[str, str], classes: str = "", renamed: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a package.

    Args:
        package: its name.
        places: the place of every public name, as ``"fedloom.engine.setting:Setting"`` or, of a module,
            ``"fedloom.models"``.
        classes: where the classes are that it does not have, for the error.
        renamed: new names by names that it had before, for the error.
    """

    def get(name: str) -> object:
        if name in (renamed or {}):
            raise AttributeError(f"{package}.{name} is now {package}.{(renamed or {})[name]}")
        if name not in places:
            close = get_close_matches(name, places, n=1)
            hint = f"did you mean {close[0]!r}? " if close else classes and name[:1].isupper() and f"{classes}; "
            names = ", ".join(sorted(places))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; {hint or ''}it has: {names}")
        module, _, attribute = places[name].partition(":")
        public = import_module(module)
        if attribute:
            public = getattr(public, attribute)
        elif "__dir__" not in vars(public):
            vars(public)["__dir__"] = lister(module)
        setattr(sys.modules[package], name, public)
        return public

    return get


def lister(name: str) -> Callable[[], list[str]]:
    """Make the ``__dir__`` of a module, so that tab completion offers its public names only.

    These are the names of ``__all__``, of a module without it, its own classes, functions and annotated constants.
    """

    def names() -> list[str]:
        module = sys.modules[name]
        if listed := getattr(module, "__all__", None):
            return sorted(listed)
        defined = {n for n, value in vars(module).items() if str(getattr(value, "__module__", "")).startswith(name)}
        return sorted(n for n in defined | {*module.__annotations__} if not n.startswith("_"))

    return names
