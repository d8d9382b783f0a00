"""User code of a deployment: the modules that its experiment refers to by import path, identical on all machines.

Modules in a folder are copied, together with everything that they import from it, to a `code` folder next to the
settings. Modules of an installed package stay in that package. The agreement contains the SHA-256 of both kinds of
modules, which is compared before the modules run. No other file in the folder is imported, not even a compiled one.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from fedloom.errors import ConfigError
from fedloom.imports import is_path
from fedloom.lab.experiment import Experiment, read
from fedloom.models.spec import DIGEST_MARK
from fedloom.storage.files import read_content
from fedloom.storage.toml_files import parse_document
from fedloom.trust import is_installed, vouch_for_paths
from fedloom_sites.deploy.setting_files import AGREED_FILE_HINT, check_agreed, check_fingerprint, sha256_hex
from fedloom_sites.deploy.settings import SharedSettings

CODE_FOLDER = "code"
INITIAL_MODEL_FILE = "weights.safetensors"
"""File with the initial model, next to the experiment file, if the agreement includes an initial model."""
IMPORT_PATH_KEYS = ("algorithm", "kind", "source", "loss", "metrics", "optimizer")
"""Keys of an experiment file whose values are import paths."""
MAX_CODE_BYTES = 4 << 20
"""Size in bytes above which user code must be installed instead of being copied. A larger folder probably also contains
unrelated files."""


@dataclass(frozen=True)
class Code:
    """User code.

    Attributes:
        files: contents of the files, keyed by their paths below `CODE_FOLDER`.
        installed: SHA-256 of the source of modules from installed packages, keyed by module name.
    """

    files: dict[str, bytes]
    installed: dict[str, str]

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of the files, keyed by path."""
        return {path: sha256_hex(data) for path, data in self.files.items()}


def collect_code(settings: Mapping[str, object]) -> Code:
    """Return the user code of an experiment whose modules have already been imported.

    Raises:
        ConfigError: a module has no source, two folders contain files with the same name, or the code is too large to
            copy.
    """
    files: dict[str, bytes] = {}
    installed: dict[str, str] = {}
    for name in sorted({path.partition(":")[0] for path in _import_paths(settings)}):
        source = Path(getattr(sys.modules[name], "__file__", None) or "")
        if source.suffix != ".py":
            raise ConfigError(
                f"the source file of user code {name!r} cannot be found. Write the code as a module in a .py file"
            )
        source = source.resolve()
        if is_installed(source):
            installed[name] = sha256_hex(source.read_bytes())
            continue
        root = source.parents[name.count(".") + (source.name == "__init__.py")]
        for path in sorted(_module_files(root, name.partition(".")[0])):
            key, data = path.relative_to(root).as_posix(), path.read_bytes()
            if files.setdefault(key, data) != data:
                raise ConfigError(
                    f"user code {key} exists in two folders, one of them {root}. Rename one of them, "
                    "or install both as packages"
                )
    size = sum(map(len, files.values()))
    if size > MAX_CODE_BYTES:
        raise ConfigError(
            f"the user code has {len(files)} files ({size >> 20} MiB together), but at most {MAX_CODE_BYTES >> 20} MiB "
            "can be copied. Move the module to its own folder, or install it at the server and every site"
        )
    return Code(files, installed)


def check_code(shared: SharedSettings) -> None:
    """Raise an error if the user code differs from the agreed-upon code, without importing its modules.

    Raises:
        ConfigError: a file or a module is missing or differs from the agreed version. The message states both digests.
    """
    for path, wanted in shared.code.items():
        file = shared.experiment.parent / CODE_FOLDER / path
        check_agreed(f"{file}", "user code", read_content(file, "the user code", AGREED_FILE_HINT), wanted)
    for module, wanted in shared.installed.items():
        try:
            spec = find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            raise ConfigError(f"user code {module!r} is not installed here. Install the same version as the server")
        code = Path(spec.origin).read_bytes()
        check_agreed(f"module {module!r}", "user code", code, wanted, "install the same version as the server")


def read_agreed(shared: SharedSettings, **engine: Any) -> Experiment:
    """Check that the user code of a server or a site is the agreed code, and return the agreed experiment.

    Raises:
        ConfigError: the experiment or the code differs from the agreement. The same error is raised if the user code
            cannot be imported.
    """
    document = parse_document(check_fingerprint(shared), shared.experiment)
    check_code(shared)
    finder = _Finder(shared.experiment.parent / CODE_FOLDER, tuple(sorted(shared.code.items())))
    if shared.code:  # before the finders of other deployments in this process
        sys.meta_path[:] = [finder, *(other for other in sys.meta_path if other != finder)]
    agreed = {*shared.installed, *(get_module_name(path) for path in shared.code)}
    vouch_for_paths(path for path in _import_paths(document) if path.partition(":")[0] in agreed)
    return read(shared.experiment, _initial_model_options(shared), recorded=True, document=document, **engine)


def get_module_name(path: str) -> str:
    """Return the module name of a file in `CODE_FOLDER`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class _Finder:
    """Import finder for the agreed modules in a folder ``code``. Other files of the folder are ignored.

    Attributes:
        folder: the folder.
        code: path and SHA-256 of each agreed file.
    """

    folder: Path
    code: tuple[tuple[str, str], ...]

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return the module spec of an agreed module, or None if the module has not been agreed on."""
        stem, wanted = name.replace(".", "/"), dict(self.code)
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            if path in wanted:
                file = str(self.folder / path)
                return spec_from_file_location(name, file, loader=_Loader(name, file, wanted[path]))
        if not any(path.startswith(f"{stem}/") for path in wanted):
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.folder / stem)]
        return spec


class _Loader(SourceFileLoader):
    """Loader that reads a module from its source, and checks that its SHA-256 matches the agreement.

    It never reads a compiled file, because its content might differ.
    """

    def __init__(self, name: str, path: str, wanted: str) -> None:
        super().__init__(name, path)
        self._wanted = wanted

    def path_stats(self, path: object) -> Mapping[str, Any]:
        raise OSError("compiled files are not compared")

    def get_data(self, path: Any) -> bytes:
        data = super().get_data(path)
        if str(path) == self.path:
            check_agreed(self.path, "user code", data, self._wanted)
        return data


def _initial_model_options(shared: SharedSettings) -> list[str]:
    """Return the command-line option that names the agreed initial model.

    Raises:
        ConfigError: the file is missing or differs from the agreed file.
    """
    if shared.start is None:
        return []
    file = shared.experiment.parent / INITIAL_MODEL_FILE
    content = read_content(file, "the initial model", AGREED_FILE_HINT)
    check_agreed(f"{file}", "initial model", content, shared.start)
    return [
        f"model.init_from={json.dumps(f'{file}{DIGEST_MARK}{shared.start}')}"
    ]  # the digest is compared again when the file is loaded


def _import_paths(settings: object) -> Iterator[str]:
    """Yield the import paths that the tables of an experiment contain."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            imports = key in IMPORT_PATH_KEYS or (key == "path" and settings.get("kind") == "import")
            named = value if isinstance(value, list | tuple) else [value]
            yield from (name for name in named if imports and is_path(name))
            yield from _import_paths(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _import_paths(value)


def _module_files(root: Path, first: str) -> set[Path]:
    """Return the files of a module or package in a folder, and all files in this folder that they import."""
    files: set[Path] = set()
    waiting, names = [first], {"fedloom", "fedloom_sites"}
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        module, package = root / f"{name}.py", root / name
        new = [module] if module.is_file() else sorted(package.rglob("*.py"))
        if name != first and not module.is_file() and not (package / "__init__.py").is_file():
            continue  # a module of the standard library or of an installed package
        files |= set(new)
        for file in new:
            waiting += _imported_names(ast.parse(file.read_bytes(), str(file)))
    return files


def _imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the top-level names that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
