"""Import the public names of a package when they are first touched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def getter(package: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a package.

    Args:
        package: its name.
        places: the place of every public name, as ``"fedloom.engine.setting:Setting"`` or, of a module,
            ``"fedloom.models"``.
    """

    def get(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has: {', '.join(sorted(places))}")
        module, _, attribute = places[name].partition(":")
        public = import_module(module)
        if attribute:
            public = getattr(public, attribute)
        setattr(sys.modules[package], name, public)
        return public

    return get
