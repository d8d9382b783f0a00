"""Classes of user code, named by an import path as ``my_package.my_module:MyMethod``.

Code of the named module is executed, and only that: a path is written by a person in an experiment file or on the
command line, never read from a file of data or of a model.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator

PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""What an import path looks like."""


def is_path(name: object) -> bool:
    """Whether a name is an import path, and not the name of something that fedloom has.

    >>> is_path("my_module:MyMethod"), is_path("fedavg"), is_path("hub:owner/name")
    (True, False, False)
    """
    return isinstance(name, str) and re.match(PATTERN, name) is not None


def find(path: str, what: str, where: str = "") -> Any:
    """What an import path names; the module is looked for in the current directory too.

    Args:
        path: ``package.module:Name``.
        what: what it should be, for the message.
        where: file and table, for the message.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module, _, name = path.partition(":")
    place = f"{where}: " if where else ""
    try:
        with _here():
            found: Any = import_module(module)
    except Exception as error:
        raise ConfigError(
            f"{place}{what} {path!r}: cannot import {module!r} ({type(error).__name__}: {error}); its folder must be "
            "installed, on PYTHONPATH, or the current directory"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            public = [entry for entry in vars(found) if not entry.startswith("_")]
            raise ConfigError(f"{place}{what} {path!r}: {module!r} has no {part!r}; {nearest(part, public)}")
        found = getattr(found, part)
    return found


def find_class(path: str, what: str, base: type, where: str = "") -> Any:
    """The class that an import path names.

    Raises:
        ConfigError: there is none, it is not a subclass of ``base``, or it lacks some of its functions.
    """
    found, place = find(path, what, where), f"{where}: " if where else ""
    if not isinstance(found, type) or not issubclass(found, base):
        got = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        wanted = f"{base.__module__}.{base.__qualname__}"
        raise ConfigError(f"{place}{what} {path!r} must be a subclass of {wanted}, got {got}")
    lacking = sorted(getattr(found, "__abstractmethods__", ()))
    if lacking:
        raise ConfigError(f"{place}{what} {path!r} lacks {', '.join(lacking)}; define them, as in {base.__name__}")
    return found


def path_of(found: type) -> str | None:
    """The import path of a class of user code; None for fedloom's own."""
    if found.__module__.partition(".")[0] == "fedloom":
        return None
    return f"{found.__module__}:{found.__qualname__}"


def source_of(found: type) -> str:
    """16 hexadecimal digits of the source of the module of a class of user code; empty where there is no source."""
    if path_of(found) is None:
        return ""
    try:
        text = inspect.getsource(sys.modules[found.__module__])
    except (OSError, TypeError, KeyError):
        return ""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextmanager
def _here() -> Iterator[None]:
    """The current directory at the end of the places where modules are looked for."""
    before = list(sys.path)
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before
