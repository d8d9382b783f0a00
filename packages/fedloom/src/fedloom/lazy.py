"""Lazy imports: the public names of a package are imported on first use."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import Any

DISPLAY_MODULE = "fedloom.lab.report.notebook"
"""Module that displays results to users. The library does not import any module of the lab, so only the module's name
is stored here."""


def import_display() -> Any:
    """Import and return the display module. This module is slow to import and only needed to show results to users."""
    return import_module(DISPLAY_MODULE)


LAZY_IMPORT_PATTERN = re.compile(r"^    from ([\w.]+) import (?:\(\s*)?(\w+) as \2\b", re.MULTILINE)
"""Pattern of the public imports in a package below ``if TYPE_CHECKING:``, such as ``import compare as compare``."""


def lazy_names(package: str) -> dict[str, str]:
    """Return the module that contains each public name that a package lists below ``if TYPE_CHECKING:``, keyed by name.

    Type checkers and lazy imports share this list, so each name appears only once in the source.
    """
    spec: Any = sys.modules[package].__spec__
    text = spec.loader.get_source(package)
    return {name: module for module, name in LAZY_IMPORT_PATTERN.findall(text.partition("if TYPE_CHECKING:")[2])}


def make_getattr(package: str, classes: str = "", renamed: Mapping[str, str] | None = None) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package, which imports one of the package's `lazy_names` on its first use.

    Args:
        package: name of the package.
        classes: advice on where to find classes that the package does not contain, for the error message.
        renamed: new names keyed by old names, for the error message.
    """
    places = lazy_names(package)

    def get(name: str) -> object:
        if name in (renamed or {}):
            raise AttributeError(f"{package}.{name} is now {package}.{(renamed or {})[name]}")
        if name not in places:
            close = get_close_matches(name, places, n=1)
            hint = f"did you mean {close[0]!r}? " if close else classes and name[:1].isupper() and f"{classes}; "
            names = ", ".join(sorted(places))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; {hint or ''}its names: {names}")
        place = places[name]
        is_part = place == package  # a submodule, which is an attribute only after its import
        public = import_module(f"{place}.{name}") if is_part else getattr(__import__(place, fromlist=[name]), name)
        if isinstance(public, ModuleType) and "__dir__" not in vars(public):
            vars(public)["__dir__"] = make_dir(public.__name__)
        setattr(sys.modules[package], name, public)
        return public

    return get


def make_dir(name: str) -> Callable[[], list[str]]:
    """Return a ``__dir__`` for a module, so that tab completion offers only the module's public names.

    These are the names in ``__all__``, or, if it is missing, the module's classes, functions and annotated constants.
    """

    def names() -> list[str]:
        module = sys.modules[name]
        if listed := getattr(module, "__all__", None):
            return sorted(listed)
        defined = {n for n, value in vars(module).items() if str(getattr(value, "__module__", "")).startswith(name)}
        return sorted(n for n in defined | {*module.__annotations__} if not n.startswith("_"))

    return names
