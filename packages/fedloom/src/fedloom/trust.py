"""Trust in user code: merely opening a file never runs code from the standard library or from another user.

A person can vouch for another user's code by ``--trust`` or ``trust=True``. It is not possible to vouch for the
standard library.
"""

from __future__ import annotations

import functools
import inspect
import os
import pwd
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from fedloom.errors import ConfigError

IMPORT_PATH_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
"""Pattern of an import path."""
OWN_PACKAGES = {"fedloom", "fedloom_clinic", "fedloom_sites", "fedloom_studies"}
"""Top-level packages of this distribution."""
TEXT_ONLY_KEYS = ("name", "label")
"""Keys of an experiment file whose values never refer to code."""
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
"""Python's folders for installed packages."""

_vouched: set[str] = set()


def is_path(name: object) -> bool:
    """Return True if a name is an import path rather than a name that is known to fedloom.

    >>> is_path("my_module:MyMethod"), is_path("fedavg"), is_path("hub:owner/name")
    (True, False, False)
    """
    return isinstance(name, str) and re.match(IMPORT_PATH_PATTERN, name) is not None


@contextmanager
def add_working_directory() -> Iterator[None]:
    """Within the block, append the current directory to the module search path."""
    before = list(sys.path)
    sys.path.append(str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def vouch_for_paths(paths: Iterable[str]) -> None:
    """Allow this process to import the code at some import paths, regardless of who owns the code."""
    _vouched.update(paths)


def is_vouched(path: str) -> bool:
    """Return True if a person has vouched for an import path."""
    return path in _vouched


def paths_in(document: object, key: str = "", *, in_import: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of an experiment file whose values are import paths, with these paths."""
    if isinstance(document, Mapping):
        of_import = document.get("kind") == "import"
        for name, value in document.items():
            if name not in TEXT_ONLY_KEYS:
                yield from paths_in(value, f"{key}.{name}" if key else str(name), in_import=of_import)
    elif isinstance(document, list | tuple):
        for value in document:
            yield from paths_in(value, key, in_import=in_import)
    elif is_path(document) and (in_import or key.rpartition(".")[2] != "path"):
        yield key, str(document)


def check_document(document: Mapping[str, object], file: Path, *, trust: bool) -> None:
    """Raise an error if a document that belongs to a different user refers to user code.

    Args:
        document: content of an experiment file or of a run directory.
        file: source file of the document.
        trust: True to vouch for the import paths in the document instead of raising an error.

    Raises:
        ConfigError: a different user owns the file or its folder. The message lists all import paths in the document.
    """
    named = list(paths_in(document))
    if trust:
        vouch_for_paths(path for _, path in named)
        return
    if named and all(is_vouched(path) for _, path in named):
        return
    owner = find_other_owner(file)
    if named and owner:
        listed = ", ".join(dict.fromkeys(f"{key} = {path!r} ({_file_of_path(path)})" for key, path in named))
        raise ConfigError(
            f"{file} belongs to another user ({owner}) and names code that would be imported and run: "
            f"{listed}. Read this code, then add --trust (in Python trust=True)"
        )


def check_module(path: str, what: str) -> None:
    """Raise an error if the module of an import path must not be imported.

    Args:
        path: ``package.module:Name``.
        what: description of the part and of the file that names it, which is used in the message.

    Raises:
        ConfigError: the module belongs to the standard library, or its file belongs to a different user and nobody has
            vouched for it.
    """
    module = path.partition(":")[0]
    if is_standard(module) or module.rpartition(".")[2] == "__main__":
        raise _standard_library_error(what, path, module)
    if is_vouched(path):
        return
    names = module.split(".")
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        if name in sys.modules:
            continue
        spec = find_spec(name)  # imports the parent packages, which were checked
        origin = Path(spec.origin) if spec is not None and spec.origin else None
        if origin is None or not origin.exists():
            continue
        if _is_in_library(origin):
            raise _standard_library_error(what, path, name)
        owner = "" if is_installed(origin) else find_other_owner(origin)
        if owner:
            raise ConfigError(
                f"{what} {path!r} would run {origin}, which belongs to another user ({owner}). Read "
                "this code, then add --trust (in Python trust=True)"
            )


def check_part(part: object, path: str, what: str) -> None:
    """Raise an error if an object is a module, class, function or method of Python itself, whatever its import path.

    Raises:
        ConfigError: the object belongs to Python itself.
    """
    while isinstance(part, functools.partial | functools.partialmethod):
        part = part.func
    if callable(part):
        part = inspect.unwrap(part)
    elif not isinstance(part, ModuleType):
        return
    origin = _get_module_name(part)
    code = getattr(getattr(part, "__func__", part), "__code__", None)
    if is_standard(origin) or (code is not None and _is_in_library(Path(code.co_filename))):
        raise _standard_library_error(what, path, origin)


def check_maker(path: str, what: str) -> None:
    """Raise an error if a call at an import path would pass values from a file to code of an installed package.

    Raises:
        ConfigError: the code belongs to an installed package or to fedloom, and nobody has vouched for it.
    """
    module = path.partition(":")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if not is_vouched(path) and (module.partition(".")[0] in OWN_PACKAGES or file is None or is_installed(Path(file))):
        raise ConfigError(
            f"{what} {path!r} is a function of an installed package, and would be called with values from the file. "
            "Name a class of nn.Module, call the function in your own function, or add --trust (in Python trust=True)"
        )


def is_standard(module: str) -> bool:
    """Return True if a module belongs to Python's standard library or is built in. Nothing is imported."""
    first = module.partition(".")[0]
    if first in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(first), "__file__", None)
    return file is not None and _is_in_library(Path(file))


def is_installed(file: Path) -> bool:
    """Return True if a file belongs to an installed package or the standard library after links have been resolved."""
    kinds = ("purelib", "platlib", "stdlib")
    return any(file.resolve().is_relative_to(Path(sysconfig.get_path(kind)).resolve()) for kind in kinds)


def find_other_owner(path: Path) -> str:
    """Return the owner of a path, or "" if this user or root is the owner.

    The owners of the path, of its target if it is a symbolic link, and of their parent folders are checked.
    """
    for place in (path, path.resolve()):
        for one in (place, place.parent):
            try:
                owner = one.lstat().st_uid
            except OSError:
                continue
            if owner not in (os.getuid(), 0):
                try:
                    return pwd.getpwuid(owner).pw_name
                except KeyError:
                    return f"uid {owner}"
    return ""


def _get_module_name(part: object) -> str:
    """Return the name of the module that defines a class, function, method or object, or the name of a module."""
    if isinstance(part, ModuleType):
        return part.__name__
    module = getattr(part, "__module__", None)
    if isinstance(module, str):
        return module
    owner = getattr(part, "__self__", None)
    if owner is None:
        owner = getattr(part, "__objclass__", type(part))
    return _get_module_name(owner if isinstance(owner, type | ModuleType) else type(owner))


def _is_in_library(file: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib")).resolve()
    place = file.resolve()
    return place.is_relative_to(library) and not any(name in PACKAGE_FOLDERS for name in place.parts)


def _file_of_path(path: str) -> str:
    """Return the file that an import path would run, or a text that states why there is no such file."""
    module = path.partition(":")[0]
    first = module.partition(".")[0]
    if is_standard(module):
        return "of Python itself"
    try:
        with add_working_directory():
            spec = find_spec(first)
    except (ImportError, ValueError):
        spec = None
    return spec.origin if spec is not None and spec.origin else "not there"


def _standard_library_error(what: str, path: str, module: str) -> ConfigError:
    return ConfigError(
        f"{what} {path!r} leads to {module!r}, a module of Python itself, which cannot be a part of "
        "an experiment. Name your own class or function"
    )
