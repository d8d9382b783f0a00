"""Classes and functions in the user's code, named by an import path such as ``my_package.my_module:MyMethod``.

Only the code of the named module is executed. A person writes the path in an experiment file or on the command line.
Paths are never read from a data file or a model file. `fedloom.trust` decides which paths are rejected.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedloom.errors import ConfigError, describe_cause
from fedloom.hints import suggest_nearest
from fedloom.trust import (
    IMPORT_PATH_PATTERN,
    OWN_PACKAGES,
    add_working_directory,
    check_maker,
    check_module,
    check_part,
    is_path,
    vouch_for_paths,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "IMPORT_PATH_PATTERN",
    "UserFunction",
    "digest_source",
    "find_class",
    "find_import_path",
    "find_maker",
    "get_import_path",
    "import_object",
    "is_path",
    "load_function",
    "read_source_text",
]  # fmt: skip


VALUE_TYPES = (bool, int, float, complex, str, bytes, tuple, list, dict, type(None))
"""Types whose values are completely determined by their text representation."""
MAIN_MODULE = "__main__"
"""Name that Python gives to the module of a script or notebook."""


def import_object(path: str, what: str, where: str = "") -> Any:
    """Return the object at an import path. The module may be in the current directory.

    Args:
        path: ``package.module:Name``.
        what: description of the expected object, which is used in the message.
        where: file and table that contain the path, which are named in the message.

    Raises:
        ConfigError: the module cannot be imported, does not contain the name, or is rejected by `fedloom.trust`.
    """
    module, _, name = path.partition(":")
    place = f"{where}: " if where else ""
    try:
        with add_working_directory():
            check_module(path, f"{place}{what}")
            target: Any = import_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit: the script ends the program
        lacks = error.name if isinstance(error, ModuleNotFoundError) else None
        cure = f"Correct the code of {module!r}" if lacks is None else f"Install {lacks!r}"
        if lacks is not None and f"{module}.".startswith(f"{lacks}."):
            cure = "Install the module, add its folder to PYTHONPATH, or run in its folder"
        raise ConfigError(
            f"{place}{what} {path!r}: cannot import {module!r} ({describe_cause(error)}). {cure}"
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            public = [entry for entry in vars(target) if not entry.startswith("_")]
            raise ConfigError(f"{place}{what} {path!r}: {module!r} has no {part!r}; {suggest_nearest(part, public)}")
        target = getattr(target, part)
        check_part(target, path, f"{place}{what}")
    return target


def find_maker(path: str, what: str, base: type | tuple[type, ...], where: str = "") -> Any:
    """Return a callable that a file names together with its options: a subclass of ``base`` or a user-defined function.

    Raises:
        ConfigError: `import_object` rejects the path, or the callable is a function of an installed package.
    """
    target = import_object(path, what, where)
    if not (isinstance(target, type) and issubclass(target, base)):
        check_maker(path, f"{where}: {what}" if where else what)
    return target


def find_class(path: str, what: str, base: type, where: str = "") -> Any:
    """Return the class at an import path.

    Raises:
        ConfigError: the class does not exist, is not a subclass of ``base``, or does not define some of the required
            functions.
    """
    target, place = import_object(path, what, where), f"{where}: " if where else ""
    if not isinstance(target, type) or not issubclass(target, base):
        got = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
        wanted = f"{base.__module__}.{base.__qualname__}"
        raise ConfigError(f"{place}{what} {path!r} must be a subclass of {wanted}, got {got}")
    lacking = sorted(getattr(target, "__abstractmethods__", ()))
    if lacking:
        raise ConfigError(
            f"{place}{what} {path!r} lacks {', '.join(lacking)}. Define these methods, as in {base.__name__}"
        )
    return target


def find_import_path(target: object) -> str | None:
    """Return the import path of a class or function, or None if another process could not import the object."""
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    imported: Any = sys.modules.get(module)
    for part in name.split("."):
        imported = getattr(imported, part, None)
    if imported is not target or module == MAIN_MODULE:
        return None
    vouch_for_paths([path := f"{module}:{name}"])
    return path


def read_source_text(target: Any) -> str:
    """Return the source code of a function, or of a class and its base classes.

    If the source is not available, return the bytecode instead.

    For any other object, return its type and its content. The result also covers the objects in the same script or
    notebook that this code uses: the source of functions and classes, and the values of other objects.
    """
    texts, reached, waiting = list[str](), set[int](), [target]
    while waiting:
        code = waiting.pop(0)
        if id(code) in reached:
            continue
        reached.add(id(code))
        texts.append(_source_text(code))
        for name, used in sorted(_used_variables(code).items()):
            if inspect.isfunction(used) or isinstance(used, type):
                waiting += [used] if used.__module__ == MAIN_MODULE else []
            elif isinstance(used, VALUE_TYPES) or type(used).__module__ in ("torch", "numpy"):
                texts.append(f"{name}={_show_values(used)}")
    return "".join(texts)


def _source_text(target: Any) -> str:
    """Return the source code of a class or function, excluding the code that it calls."""
    if isinstance(target, type):
        return "".join(map(_source_text, _functions_of_class(target))) or target.__qualname__
    try:
        return inspect.getsource(target)
    except (OSError, TypeError):
        code = getattr(target, "__code__", None)
        if code is None:
            return _show_values(target, f"{type(target)}", getattr(target, "__dict__", ""))
        return _show_values(code.co_code, code.co_names, code.co_consts)


def _show_values(*values: object) -> str:
    """Return values in Python notation, without their memory addresses."""
    return re.sub(" at 0x[0-9a-f]+", "", " ".join(map(repr, values)))


def _functions_of_class(target: Any) -> list[Any]:
    """Return the functions of a class and of its base classes outside torch, or the function itself."""
    if isinstance(target, type):
        classes = [c for c in target.__mro__ if c.__module__.partition(".")[0] not in ("torch", "builtins")]
        return [f for c in classes for f in vars(c).values() if inspect.isfunction(f)]
    function = getattr(target, "__func__", getattr(target, "func", target))  # function of a method or of a partial
    return [function] if inspect.isfunction(function) else []


def _used_variables(target: Any) -> dict[str, Any]:
    """Return the global and closure variables of the script or notebook that some code uses, keyed by name."""
    kind = target if isinstance(target, type) else type(target)
    classes = [c for c in kind.__mro__ if c.__module__ == MAIN_MODULE]
    used: dict[str, Any] = {} if kind is target else {c.__name__: c for c in classes}
    used |= {name: v for c in classes for name, v in vars(c).items() if isinstance(v, VALUE_TYPES) and name[0] != "_"}
    for function in _functions_of_class(target):
        if function.__module__ != MAIN_MODULE:
            continue
        codes = [function.__code__]
        for code in codes:
            codes += filter(inspect.iscode, code.co_consts)
            read = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
            used |= {name: function.__globals__[name] for name in read & function.__globals__.keys()}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # the cell is empty
                used[name] = cell.cell_contents
    return used


@dataclass(frozen=True)
class UserFunction:
    """User-defined function.

    Attributes:
        name: import path. For code that exists only in this process, such as a notebook cell, this is the function's
            name and a digest.
        call: the function or, if a class was given, an instance created without arguments.
    """

    name: str
    call: Callable[..., Any] = field(compare=False, repr=False)

    @property
    def short(self) -> str:
        """Name without the module path and the digest."""
        return re.split(r"[:.]", self.display_name)[-1]

    @property
    def display_name(self) -> str:
        """Name shown in messages: the import path if there is one, or else the plain name."""
        return self.name.partition(" ")[0]


def load_function(choice: Any, what: str) -> UserFunction:
    """Return a function that is given either directly or by its import path.

    Raises:
        ConfigError: the value is neither a function nor an import path, or cannot be imported.
    """
    if isinstance(choice, UserFunction):
        return choice
    target = import_object(choice, what) if is_path(choice) else choice
    if isinstance(choice, str) and re.fullmatch(r"\S+ [0-9a-f]{16}", choice):
        raise ConfigError(
            f"{what}: the function {choice.partition(' ')[0]!r} was passed as a Python object and has no import path. "
            "In Python, the same call of fl.compare with this folder returns its models, and does not rerun anything"
        )
    if not callable(target):
        raise ConfigError(f"{what} must be an import path, package.module:name, or a function, got {choice!r}")
    path = choice if is_path(choice) else find_import_path(target)
    name = getattr(target, "__qualname__", type(target).__qualname__).rpartition(".")[2]
    digest = hashlib.blake2b(read_source_text(target).encode(), digest_size=8).hexdigest()
    if isinstance(target, type):
        try:
            target = target()
        except Exception as error:
            raise ConfigError(
                f"{what} {name!r} is a class that cannot be created without arguments: {error}"
            ) from error
    return UserFunction(path or f"{name} {digest}", target)


def get_import_path(definition: Any) -> str | None:
    """Return the import path of a user-written class, or None if the class belongs to this distribution."""
    if definition.__module__.partition(".")[0] in OWN_PACKAGES:
        return None
    return f"{definition.__module__}:{definition.__qualname__}"


def digest_source(definition: object) -> str:
    """Return 16 hexadecimal digits that identify the source of the user's module or, if there is no source, its code.

    If the code is part of fedloom, the text is empty.
    """
    if get_import_path(definition) is None:
        return ""
    try:
        text = inspect.getsource(sys.modules[definition.__module__])
    except (OSError, TypeError, KeyError):  # code in a notebook has no source file
        text = read_source_text(definition)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
