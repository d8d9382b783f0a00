"""The project keeps its own rules: public names, start-up, dependencies, floors beyond import-linter, documents."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import random  # noqa: TID251
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from importlib.machinery import SourceFileLoader
from importlib.metadata import distribution
from pathlib import Path
from pydoc import locate
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedloom as fl
from fedloom.lab.cli._app import PACKAGES_BY_MODULE as COMMANDS
from fedloom.models.spec import CONSTRUCTIONS

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "fedloom": ROOT / "packages" / "fedloom",
    "fedloom_clinic": ROOT / "packages" / "fedloom-clinic",
    "fedloom_sites": ROOT / "packages" / "fedloom-sites",
    "fedloom_studies": ROOT / "packages" / "fedloom-studies",
}
"""The folder of every package, by the name that Python imports."""
SOURCE = PACKAGES["fedloom"] / "src" / "fedloom"
MODULES = {
    (
        file.relative_to(folder / "src" / name) if name == "fedloom" else file.relative_to(folder / "src")
    ).as_posix(): file
    for name, folder in PACKAGES.items()
    for file in sorted((folder / "src" / name).rglob("*.py"))
}
"""Files of the source: of the library by their place in it, of the others with the package before."""
PROJECTS = {
    name: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for name, folder in PACKAGES.items()
}


def imports(nodes: Iterable[ast.AST]) -> set[str]:
    """Full dotted names that some nodes import."""
    out = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            out |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return out


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def every(name: str) -> list[ast.AST]:
    """All nodes of a module."""
    return list(ast.walk(parsed(name)))


@cache
def used(name: str) -> set[str]:
    """What a module imports, and its attribute chains such as ``torch.nn.functional``."""
    found = set()
    for node in every(name):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            found.add(".".join([node.id, *reversed(parts)]))
    return imports(every(name)) | found


def calls(name: str) -> set[str]:
    """Names of the methods that a module calls."""
    found = (node.func for node in every(name) if isinstance(node, ast.Call))
    return {function.attr for function in found if isinstance(function, ast.Attribute)}


def run(code: str) -> str:
    """What a fresh interpreter prints; it may keep compiled modules, as an installed one does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PUBLIC_NAMES = """
import importlib, inspect, pkgutil
missing = []
for package in ("fedloom", "fedloom_clinic", "fedloom_sites", "fedloom_studies"):
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        get = vars(module).get("__getattr__")
        lazy = inspect.getclosurevars(get).nonlocals.get("places", ()) if get else ()
        missing += [f"{info.name}.{n}" for n in {*getattr(module, "__all__", ()), *lazy} if not hasattr(module, n)]
print(*sorted(missing))
"""
"""Imports every module, and asks it for every name of its ``__all__`` and of its lazy imports."""


def test_every_module_imports_and_has_its_public_names() -> None:
    assert run(PUBLIC_NAMES) == ""


# --- the public face


def module_of(name: str) -> str:
    parts = Path(name).with_suffix("").parts
    parts = parts if parts[0] in PACKAGES else ("fedloom", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tied_to(name: str, modules: set[str]) -> set[str]:
    """Modules that a file needs to be read: imports for types count, those inside functions do not."""
    found, ahead = set[str](), list[ast.AST]([parsed(name)])
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {n if n in modules else node.module for n in names}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            ahead += ast.iter_child_nodes(node)
    return found & modules - {module_of(name)}


def test_no_circle_of_files() -> None:
    modules = {module_of(name) for name in MODULES}
    graph = {module_of(name): tied_to(name, modules) for name in MODULES}
    assert graph["fedloom.engine.round"] >= {"fedloom.engine.job", "fedloom.engine.clients.uploads"}
    TopologicalSorter(graph).prepare()  # raises with the circle


def test_csv_is_written_and_lines_are_shown_in_one_place() -> None:
    """Cells that a spreadsheet would compute, and control characters of names, are disarmed there."""
    homes = {"csv.writer(": "lab/report/csv_files.py", "DictWriter(": "", "write_csv(": "lab/report/csv_files.py"}
    homes |= {"typer.echo(": "lab/cli/_app.py"}
    for call, home in homes.items():
        assert {name for name, file in MODULES.items() if call in file.read_text()} <= {home}, call


SHOWN = ("lab/", "fedloom_studies/")
"""Rooms whose numbers are for people; elsewhere numbers are parts of refusals."""


def test_numbers_become_text_in_one_place() -> None:
    """Only `fedloom.formats` has a format of floats; the cells of CSV files are for machines."""
    homes = {
        name
        for name in MODULES
        if name.startswith(SHOWN)
        for node in every(name)
        if isinstance(node, ast.FormattedValue) and isinstance(node.format_spec, ast.JoinedStr)
        for part in node.format_spec.values
        if isinstance(part, ast.Constant) and re.search(r"[efg%]$", part.value)
    }
    assert homes <= {"lab/report/csv_files.py"}


def test_a_folder_has_few_files_and_the_round_is_one_page() -> None:
    folders = Counter(Path(name).parent for name in MODULES if Path(name).name != "__init__.py")
    assert {str(folder) for folder, count in folders.items() if count > 16} <= {"algorithms", "data/sources"}
    assert len((SOURCE / "engine" / "round.py").read_text().splitlines()) <= 120


VAGUE = {
    "asked", "brought", "found", "given", "gone", "heard", "judged", "known", "late", "made", "mine", "others", "ours",
    "own", "played", "said", "seen", "settled", "taken", "theirs", "there", "these", "those", "told", "watched",
    "which", "whose", "written",
}  # fmt: skip
"""Words that name no content; those that are left become fewer."""
SHARED = {"Client", "Down", "Model", "Server", "Up"}
"""Class names of several files: states and messages of a method, as in its paper, and a trained model."""


def test_names_without_content_become_fewer() -> None:
    nodes = [node for name in MODULES for node in every(name)]
    bound = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    bound += [node.arg for node in nodes if isinstance(node, ast.arg)]
    bound += [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert sum(name.strip("_").lower() in VAGUE for name in bound) <= 20


def test_a_construction_of_a_network_is_named_in_its_own_file_alone() -> None:
    """Its key, its network and its refusals stand together: neither a run nor the base of models asks for its key."""
    keys = {one.option for one in CONSTRUCTIONS}
    assert keys == {"mixture", "guided", "memory"}
    for name in MODULES:
        model = "self" if name == "models/spec.py" else "setting.model"
        nodes = [node for node in every(name) if isinstance(node, ast.Attribute)]
        assert not keys & {node.attr for node in nodes if ast.unparse(node.value) == model}, name


def test_a_public_class_has_a_name_of_its_own() -> None:
    classes = ({node.name for node in every(name) if isinstance(node, ast.ClassDef)} for name in MODULES)
    homes = Counter(name for names in classes for name in names if not name.startswith("_"))
    assert {name for name, count in homes.items() if count > 1} <= SHARED


OLD_KEY_MODULES = ("engine/checks/moved.py", "hints.py")
"""Modules that know the keys of old files."""


def test_library_lab_and_sites_name_no_clinical_analysis() -> None:
    """No identifier, key, import or message is about Cox's regression: analyses are reached by the registry."""
    kinds = ("id", "attr", "name", "arg", "module", "asname")
    named = set[str]()
    for name in MODULES:
        if name.startswith(("fedloom_clinic", "fedloom_studies")) or name in OLD_KEY_MODULES:
            continue
        nodes = [*every(name)]
        texts = {
            id(node.body[0].value)
            for node in nodes
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
            and isinstance(node.body[0], ast.Expr)
        }  # fmt: skip
        words = [getattr(node, kind, None) for node in nodes for kind in kinds]
        words += [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in texts]
        named |= {f"{name}: {word}" for word in words if isinstance(word, str) and "cox" in word.lower()}
    assert not named


def test_a_module_opens_with_its_subject() -> None:
    openings = {name: ast.get_docstring(parsed(name)) or "" for name in MODULES}
    assert not [
        name for name, text in openings.items() if re.match(r"(what|how|whether|who|of|where|that)\b", text, re.I)
    ]


def test_the_page_on_the_architecture_is_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 120


def test_the_page_on_the_architecture_names_files_that_are_there() -> None:
    named = set(re.findall(r"`([a-z_/]+/[a-z_]+\.py)`", (ROOT / "docs" / "architecture.md").read_text()))
    assert len(named) > 10
    assert not {name for name in named if name not in MODULES}


def test_the_page_on_the_architecture_names_parts_that_are_there() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`(?:\w+\.)*([A-Za-z]\w*)`", text))
    nodes = [node for name in MODULES for node in every(name)]
    parts = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    parts |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    parts |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    parts |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert len(named) > 10
    words = {"list", "json", "toml", "html", "parquet"} | {"commands", "lists", "results", "lab", *PACKAGES}
    assert named - parts <= words  # a command, and endings of files


THROUGH = {
    "algorithms/fedavg.py": {"engine/clients/chunk.py"},  # by the registry, as the job's method
    "engine/clients/chunk.py": {"engine/clients/messages.py"},  # by the job
}
"""Hops of the page's walks at which neither file imports the other."""


def steps_of_walks() -> list[list[str]]:
    """The files of every numbered walk on the page of the architecture, in its order."""
    text = (
        (ROOT / "docs" / "architecture.md")
        .read_text()
        .partition("## The path of an upload")[2]
        .partition("## Ranks")[0]
    )
    return [re.findall(r"^\d+\. .*?`([a-z_/]+\.py)`", part, re.MULTILINE) for part in re.split(r"\n(?=1\. )", text)[1:]]


@cache
def hops(name: str) -> set[str]:
    """Files that a file leads to: imports anywhere in it, also of what a package hands on, and `THROUGH`."""
    homes = {module_of(n): n for n in MODULES}
    names = imports(every(name))
    for package in names & {module_of(n) for n in MODULES if n.endswith("/__init__.py")}:
        texts = [node.value for node in every(homes[package]) if isinstance(node, ast.Constant)]
        lazy = {f"{package}.{text}" for text in texts if isinstance(text, str)}
        names = names | imports(every(homes[package])) | lazy
    return {homes[n] for n in names if n in homes} | THROUGH.get(name, set())


def broken(steps: list[str]) -> list[str]:
    """Files of a walk that are tied to none before them, nor to the next one."""
    around = [(file, {*steps[:k], *steps[k + 1 : k + 2]}) for k, file in enumerate(steps)][1:]
    return [file for file, others in around if not hops(file) & others and not any(file in hops(o) for o in others)]


def test_the_walks_of_the_architecture_go_from_file_to_file() -> None:
    walks = steps_of_walks()
    assert [len(steps) for steps in walks] == [7]
    assert [broken(steps) for steps in walks] == [[]]
    assert all(broken([*steps[:-1], "rows/proxes/sets.py"]) for steps in walks)


REFERENCE = (ROOT / "docs" / "python.md").read_text()
EFFECTS = re.compile("(accept|ask|play|refuse|save|send|show|start|stop|store|wait)s? ", re.IGNORECASE)
"""Verbs at the head of a docstring whose object is not what the function returns."""
FUNCTIONS = {node.name: node for name in MODULES for node in parsed(name).body if isinstance(node, ast.FunctionDef)}
CLASSES = {node.name: node for name in MODULES for node in parsed(name).body if isinstance(node, ast.ClassDef)}


def exported() -> set[str]:
    """Names that a package's ``__init__`` exports, and those of the reference."""
    names = set(re.findall(r"^::: [\w.]+\.(\w+)$", REFERENCE, re.MULTILINE))
    for assigned in (n for name in MODULES if name.endswith("__init__.py") for n in parsed(name).body):
        if isinstance(assigned, ast.Assign) and ast.unparse(assigned.targets[0]) in ("__all__", "_MODULES", "_WHERE"):
            names |= {node.value for node in ast.walk(assigned) if isinstance(node, ast.Constant)}
    return names


def public_parts() -> dict[str, tuple[ast.FunctionDef, list[ast.ClassDef]]]:
    """Public functions, and public methods with their class and its bases; those of the command line print."""
    names, modules, parts = exported(), set(re.findall(r"^::: ([\w.]+)$", REFERENCE, re.MULTILINE)), {}
    nodes = [(name, node) for name in MODULES if "cli/" not in name for node in parsed(name).body]
    for name, node in nodes:
        if isinstance(node, ast.FunctionDef) and (node.name in names or module_of(name) in modules):
            parts[f"{name}: {node.name}"] = node, []
        if isinstance(node, ast.ClassDef) and (node.name in names or module_of(name) in modules):
            methods = [member for member in node.body if isinstance(member, ast.FunctionDef)]
            parts |= {f"{name}: {node.name}.{method.name}": (method, lineage(node)) for method in methods}
    hidden = re.compile(r".*[ .]_(?!_init__$|_post_init__$|_call__$)\w*$")
    parts = {key: part for key, part in parts.items() if not hidden.match(key)}
    return parts


def lineage(node: ast.ClassDef) -> list[ast.ClassDef]:
    """A class and its bases within the project."""
    bases = [CLASSES.get(re.split(r"\W", ast.unparse(base))[0]) for base in node.bases]
    return [node, *(ancestor for base in bases if base is not None for ancestor in lineage(base))]


def docstrings(function: ast.FunctionDef, owners: list[ast.ClassDef]) -> list[str]:
    """That of a function, then those of its class and of what it overrides."""
    nodes = [m for o in owners[1:] for m in o.body if isinstance(m, ast.FunctionDef) and m.name == function.name]
    return [ast.get_docstring(node) or "" for node in (function, *owners[:1], *nodes)]


def raised(function: ast.FunctionDef) -> set[str]:
    """Classes that its body raises by name, those of nested functions left out."""
    classes, ahead = set[str](), list[ast.AST](function.body)
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).split(".")[-1]
            maker = FUNCTIONS.get(name)
            classes.add(ast.unparse(maker.returns) if maker and maker.returns else name)
        translated = isinstance(node, ast.With) and "attribute_error" in ast.unparse(node.items[0])
        if not translated and not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            ahead += ast.iter_child_nodes(node)
    return classes - {"AssertionError", "NotImplementedError"}


def test_what_a_public_function_raises_is_in_its_docstring() -> None:
    """By its class or a base of it; a method may leave it to its class, or to the method that it overrides."""
    undocumented, parts = [], public_parts()
    for key, (function, owners) in parts.items():
        sections = [
            re.findall(r"^Raises:\n((?:[ \n].*\n?)*)", text, re.MULTILINE) for text in docstrings(function, owners)
        ]
        named = set(re.findall(r"\w+", str(sections)))
        for name in raised(function):
            error = getattr(fl.errors, name, None) or getattr(builtins, name, None)
            bases = {base.__name__ for base in error.__mro__[:-2]} if isinstance(error, type) else {name}
            undocumented += [f"{key}: {name}"] if not bases & named else []
    assert not undocumented
    assert len(parts) > 600


def test_every_error_that_a_docstring_names_exists() -> None:
    unknown, sections = list[str](), 0
    for module in MODULES:
        tree = parsed(module)
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        for node in ast.walk(tree):
            text = (ast.get_docstring(node) or "") if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
            for section in re.findall(r"^Raises:\n((?:[ \n].*\n?)*)", text, re.MULTILINE):
                names = set(re.findall(r"[\w.]+", str(re.findall(r"^ {4}([\w., ]+): ", section, re.MULTILINE))))
                known = imported | CLASSES.keys() | set(dir(builtins))
                unknown += [f"{module}: {name}" for name in names if name not in known and not locate(name)]
                sections += 1
    assert not unknown
    assert sections > 700


def test_what_a_public_function_returns_is_in_its_docstring() -> None:
    """In its first line, unless that begins with an effect; and where it may be None, when it is."""
    undocumented = []
    for key, (function, owners) in public_parts().items():
        kind, texts = ast.unparse(function.returns) if function.returns else "None", docstrings(function, owners)
        text = texts[0] or " ".join(texts[2:])
        if function.name[0] != "_" and not re.match(r"(None|Never|NoReturn|Self|Iterator\[None\])$", kind):
            effect = EFFECTS.match(text) and not re.search(r"\b(return|yield)", text, re.IGNORECASE)
            undocumented += [key] if effect or ("| None" in kind and text and "None" not in " ".join(texts)) else []
    assert not undocumented


def test_public_names_are_the_ones_that_type_checkers_see() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(fl.__all__) - {"__version__"} <= set(dir(fl))


@pytest.mark.parametrize("name", fl.__all__)
def test_every_public_name_can_be_touched(name: str) -> None:
    assert getattr(fl, name) is getattr(fl, name)


@pytest.mark.parametrize("name", [name for name in fl.__all__ if isinstance(getattr(fl, name), ModuleType)])
def test_completion_offers_public_names_only(name: str) -> None:
    module = getattr(fl, name)
    offered = dir(module)
    assert offered
    assert not [one for one in offered if one.startswith("_") or isinstance(getattr(module, one), ModuleType)]
    assert not {"TYPE_CHECKING", "Any", "Callable", "ClassVar", "Field", "annotations", "getter", "torch"} & {*offered}
    assert {*getattr(module, "__all__", offered)} == {*offered}


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'.*simulate"):
        fl.simulat  # noqa: B018


def test_import_and_help_load_no_torch() -> None:
    assert run("import fedloom, sys; print('torch' in sys.modules)") == "False"
    call = "import sys; from fedloom.lab.cli import main; sys.argv = ['fedloom', '--help']"
    text = run(f"{call}\ntry: main()\nfinally: print('torch:', 'torch' in sys.modules)")
    assert text.endswith("torch: False")
    assert "run" in text


def test_without_flwr_its_users_package_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['flwr'] = None; import fedloom; fedloom.simulate"
    text = run(f"{hidden}\ntry: import fedloom_sites.flower\nexcept ImportError as error: print(error)")
    assert text == "fedloom_sites.flower needs flwr. Install it with: pip install fedloom-sites"


def takes_less(limit: float, before: str, code: str) -> bool:
    """Whether one of three fresh interpreters needs less processor time, in seconds, for `code` after `before`."""
    timed = f"{before}\nimport time; start = time.process_time()\n{code}\nprint('\\n', time.process_time() - start)"
    return any(float(run(timed).split()[-1]) < limit for _ in range(3))


def test_opening_a_run_loads_no_charts() -> None:
    assert run("import sys, fedloom; fedloom.open_run; print({'altair', 'vl_convert'} & set(sys.modules))") == "set()"


def test_neither_the_engine_nor_the_report_knows_a_method() -> None:
    names = {*fl.algorithms.REGISTRY}
    classes = {entry.__name__ for entry in fl.algorithms.ALGORITHMS.values()}
    for module in MODULES:
        if not module.startswith(("engine/", "lab/report/")):
            continue
        tree = ast.parse((SOURCE / module).read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert not imported & classes, (module, imported & classes)
        if module.startswith("lab/report/"):
            compared = [
                node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.Tuple | ast.Set | ast.List)
            ]
            texts = {n.value for node in compared for n in ast.walk(node) if isinstance(n, ast.Constant)}
            assert not texts & names, (module, texts & names)


SLOW = {
    "scipy", "rich", "pyarrow.compute", "altair", "vl_convert", "typer", "flwr", "optuna", "sklearn", "pandas", "numba",
    "matplotlib", "statsmodels", "tensorboard", "torchvision", "transformers", "datasets",
}  # fmt: skip
"""Modules that are slow to import and that no run needs before its first round."""


def test_a_name_of_the_library_loads_nothing_slow_but_torch_and_its_own() -> None:
    """Each in a fork that has only torch before it."""
    names = ("simulate", "compare", "open_run", "Federation")
    code = f"""
import os, sys, torch
for name in {names!r}:
    if os.fork() == 0:
        before = {{*sys.modules}}
        import fedloom
        getattr(fedloom, name)
        print(name, *sorted({SLOW!r} & (sys.modules.keys() - before)), flush=True)
        os._exit(0)
    os.wait()
"""
    assert run(code).split("\n") == [*names]


@pytest.mark.parametrize(
    ("old", "new"),
    [("aggregate", "aggregators"), ("channel", "channels"), ("partition", "partitions"), ("prox", "proxes")],
)
def test_an_old_name_of_a_module_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=rf"^fedloom\.{old} is now fedloom\.{new}$"):
        getattr(fl, old)
    assert getattr(fl, new).__name__.endswith(f".{new}")
    assert old not in dir(fl)


def test_windows_is_told_where_to_run() -> None:
    code = "import sys; sys.platform = 'win32'\ntry: import fedloom\nexcept ImportError as error: print(error)"
    assert "Linux and macOS" in run(code)


def test_help_comes_at_once() -> None:
    call = "from fedloom.lab.cli import main\ntry: main()\nexcept SystemExit: pass"
    assert takes_less(0.5, "import sys; sys.argv = ['fedloom', '--help']", call)


def test_simulate_costs_little_beyond_torch_and_pydantic() -> None:
    """A part of what torch's own import takes. Pydantic loads its modules when a name is asked for."""
    timed = """
import time
a = time.process_time()
import torch
b = time.process_time()
import fedloom
from pydantic import BaseModel, TypeAdapter
c = time.process_time()
fedloom.simulate
print("\\n", (time.process_time() - c) / (b - a))"""
    assert any(float(run(timed).split()[-1]) < 0.35 for _ in range(3))


# --- dependencies


@cache
def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def required(project: dict[str, Any]) -> list[str]:
    """Return the dependencies of a package, those of its extras too."""
    return [
        *project["dependencies"],
        *(r for extra in project.get("optional-dependencies", {}).values() for r in extra),
    ]


REQUIRED = sorted({r for project in PROJECTS.values() for r in required(project)})
DEV = [
    line
    for line in (ROOT / "requirements-dev.txt").read_text().splitlines()
    if line and not line.startswith(("#", "-e"))
]
INSTALLED = re.findall(r"^-e ./packages/([\w-]+)(?:\[([\w,]*)\])?$", (ROOT / "requirements-dev.txt").read_text(), re.M)
"""Packages that the file installs, and their extras."""
NOT_IN_DEV = {"datasets", "fedloom", "wandb"}


@pytest.mark.parametrize("text", [text for text in REQUIRED if Requirement(text).name not in NOT_IN_DEV])
def test_dependencies_are_pinned_within_their_range(text: str) -> None:
    requirement = Requirement(text)
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_pins_are_what_ci_installs_and_no_more() -> None:
    assert {name for name, _ in INSTALLED} == {project["name"] for project in PROJECTS.values()}
    wanted = [Requirement(f"{name}[{extras}]" if extras else name) for name, extras in INSTALLED]
    wanted += [Requirement(r) for r in DEV]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        requirement = wanted.pop()
        one = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if one not in seen:
            seen.add(one)
            for further in map(Requirement, distribution(requirement.name).requires or []):
                extras = ["", *requirement.extras]
                if further.marker is None or any(further.marker.evaluate({"extra": e}) for e in extras):
                    wanted.append(further)
    assert set(pins()) == {name for name, _ in seen} - {project["name"] for project in PROJECTS.values()}


def test_what_a_deployment_installs_is_pinned_by_hash() -> None:
    text = (ROOT / "requirements-deploy.txt").read_text()
    blocks = [block for block in re.split(r"\n(?=\S)", text) if not block.startswith("#")]
    locked = {}
    for block in blocks:
        requirement, *hashes = block.replace("\\\n", "").split("--hash=")
        name, _, version = requirement.partition(";")[0].strip().partition("==")
        locked[canonicalize_name(name)] = version
        assert hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one.strip()) for one in hashes), name
    known = pins()
    assert {name: version for name, version in locked.items() if name in known} == {
        n: known[n] for n in locked if n in known
    }
    sites = PROJECTS["fedloom_sites"]
    wanted = [*PROJECTS["fedloom"]["dependencies"], *sites["dependencies"], *sites["optional-dependencies"]["deploy"]]
    for requirement in (r for r in map(Requirement, [*wanted, "hatchling"]) if r.name != "fedloom"):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])


@pytest.mark.slow
def test_make_lock_writes_what_is_committed(tmp_path: Path) -> None:
    """With the pins of CI, the listed versions and hashes follow from the packages' requirements. It asks PyPI."""
    for name in ("Makefile", "constraints.txt", "requirements-dev.txt", "requirements-deploy.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "packages", tmp_path / "packages", ignore=shutil.ignore_patterns("tests", "__pycache__"))
    venv = Path(sys.executable).parents[1]
    command = ["make", "--old-file", f"{venv}/.dev-ready", f"VENV={venv}", "lock"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "requirements-deploy.txt").read_text() == (ROOT / "requirements-deploy.txt").read_text()


NAMES = {"pillow": "PIL", "scikit-learn": "sklearn", "vl-convert-python": "vl_convert"}
EXTRAS = {
    "Crypto", "altair", "cryptography", "datasets", "dp_accounting", "flwr", "mlflow", "onnx", "onnxscript", "opendp",
    "optuna", "pooch", "prometheus_client", "requests", "scikit_posthocs", "tensorboard", "transformers",
    "vl_convert", "wandb",
}  # fmt: skip
WITH_PYDANTIC = {"annotated_types", "pydantic_core", "typing_extensions"}


@pytest.mark.parametrize("name", MODULES)
def test_imports_are_declared(name: str) -> None:
    own = name.partition("/")[0] if name.partition("/")[0] in PACKAGES else "fedloom"
    declared = [*PROJECTS["fedloom"]["dependencies"], *PROJECTS[own]["dependencies"]]
    core = {NAMES.get(n, n.replace("-", "_")) for n in (Requirement(r).name for r in declared)}
    allowed = core | set(sys.stdlib_module_names) | {"fedloom", own, *WITH_PYDANTIC}
    assert {name.split(".")[0] for name in imports(every(name))} <= allowed | EXTRAS
    if name.startswith(("fedloom_sites/", "lab/tune/", "fedloom_studies/")):
        assert {
            name.split(".")[0] for name in imports(every(name))
        } & EXTRAS <= COMMANDS.keys()  # a sentence if missing
    if not name.startswith(("fedloom_sites/", "lab/tune/")):
        assert {name.split(".")[0] for name in imports(parsed(name).body)} <= allowed, (
            "extras are imported where they are used"
        )


# --- floors that import-linter cannot see


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("algorithms/")])
def test_algorithms_know_no_modules_and_no_autograd(name: str) -> None:
    assert not [name for name in used(name) if re.match(r"torch\.(nn|autograd|func|optim)\b", name)]
    assert not calls(name) & {"backward", "requires_grad_"}


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("local/")])
def test_only_the_local_floor_calls_autograd(name: str) -> None:
    assert not [
        name for name in used(name) if re.match(r"torch\.(autograd|func\.(grad|vjp|jvp|jac\w+|hessian))\b", name)
    ]
    assert not calls(name) & {"backward", "requires_grad_"}


DRAWS = {"bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm"}
DRAWS_IN_PLACE = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "normal_", "random_", "uniform_"}


@pytest.mark.parametrize("name", MODULES)
def test_every_draw_names_its_generator(name: str) -> None:
    for node in every(name):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, call = ast.unparse(node.func.value), node.func.attr
            if (owner == "torch" and call in DRAWS) or call in DRAWS_IN_PLACE:
                assert "generator" in {k.arg for k in node.keywords}, f"{name}:{node.lineno} {ast.unparse(node)}"


# --- documents


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda f: f.name)
def test_examples_are_experiments(file: Path) -> None:
    assert fl.experiment.read(file).settings()["name"] == file.stem


def test_version_is_said_once() -> None:
    for name in ("fedloom_sites", "fedloom_studies"):
        assert PROJECTS[name]["version"] == fl.__version__
        assert any(
            Requirement(r).name == "fedloom" and fl.__version__ in Requirement(r).specifier
            for r in PROJECTS[name]["dependencies"]
        )
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)[1] == fl.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1] == fl.__version__


def test_a_draw_without_a_seed_is_that_of_the_name_of_the_test(request: pytest.FixtureRequest) -> None:
    """So that a test that fails by a draw fails again."""
    seed = zlib.crc32(request.node.nodeid.encode())
    assert random.random() == random.Random(seed).random()
    assert np.random.random() == np.random.RandomState(seed).random_sample()  # noqa: NPY002
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(seed))


def test_scripts_can_be_run() -> None:
    for script in ("scripts/check", "scripts/mutants", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script


def test_the_repository_has_no_links_and_ignores_what_is_written_here() -> None:
    """A link leads to a place of the machine on which it was made, and `make demo` would stop at a link `runs`."""
    staged = _git("ls-files", "--stage")
    assert [line for line in staged.splitlines() if line.startswith("120000")] == []
    written = [".venv", "build", "dist", "runs", ".mypy_cache", "packages/fedloom/build"]  # folders, or links to them
    assert _git("check-ignore", "--no-index", *written).split() == written


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 128:
        pytest.skip(f"no repository of git: {done.stderr.strip()}")
    return done.stdout


def test_a_room_above_its_budget_is_reported() -> None:
    budget = load("scripts/budget.py")
    text = '"""A docstring."""\n\n# a comment\nX = (\n    1,\n)\n\n\ndef f():\n    """Another."""\n    return X\n'
    assert budget.count_lines(text) == 5
    rooms, limits = {"fedloom": Counter(engine=10, local=5)}, {"fedloom": {"engine": 10, "local": 5}}
    assert budget.find_excess(rooms, limits) == []
    (above,) = budget.find_excess({"fedloom": Counter(engine=11, local=5)}, limits)
    assert above.startswith("fedloom/engine: 11 lines of code, but the limit is 10. ")
    (new,) = budget.find_excess(rooms | {"fedloom_new": Counter(top=1)}, limits)
    assert "the limit is missing" in new


def test_the_library_runs_without_other_packages_and_charts() -> None:
    code = """
import sys

sys.modules |= dict.fromkeys(("flwr", "altair", "vl_convert", "typer"))
sys.modules |= dict.fromkeys(("fedloom_clinic", "fedloom_sites", "fedloom_studies"))
import fedloom as fl
fed = fl.partitions.iid(clients=3)(fl.load('digits'), seed=0)
compared = fl.compare(['fedavg', 'local'], fed, 'softmax', rounds=1)
for result in (fl.simulate('fedavg', fed, 'softmax', rounds=1), compared):
    print(result)
    try:
        (result.chart if hasattr(result, "chart") else result.plot)()
    except fl.errors.ConfigError as error:
        print(error)
    print("END")
"""
    *results, rest = run(code).split("END")
    assert (len(results), rest) == (2, "")
    for printed in results:
        assert "accuracy" in printed
        assert "charts need altair: pip install 'fedloom[charts]'" in printed


def test_a_run_without_charts_ends_and_names_the_extra_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(
        'rounds = 1\n[data]\nsource = "digits"\n[partition]\nclients = 3\n[[method]]\nalgorithm = "local"\n'
    )
    code = f"""
import sys

sys.modules |= dict.fromkeys(("altair", "vl_convert"))
sys.stderr = sys.stdout
sys.argv = ["fedloom", "run", {str(tmp_path / "small.toml")!r}, "--out", {str(tmp_path / "run")!r}]
from fedloom.lab.cli import app
app(standalone_mode=False)
"""
    printed = run(code)
    assert "no report.html is written, because" in printed
    assert "fedloom[charts]" in printed
    assert (tmp_path / "run" / "metrics.parquet").exists()
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("own", PACKAGES)
def test_the_tests_of_a_package_import_no_other_package(own: str) -> None:
    """A test that needs two packages stands in tests/, or asks for the other by ``pytest.importorskip``."""
    others = {*PACKAGES} - {own, "fedloom"}
    for path in (ROOT / "packages" / own.replace("_", "-") / "tests").rglob("*.py"):
        assert not {name.partition(".")[0] for name in imports(ast.walk(ast.parse(path.read_text())))} & others, path


@pytest.mark.slow
@pytest.mark.parametrize("own", PACKAGES)
def test_the_tests_of_a_package_are_found_without_the_other_packages(own: str) -> None:
    tests = ROOT / "packages" / own.replace("_", "-") / "tests"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--alone", own, "--collect-only", "-q", str(tests)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-2000:]


# --- scripts/mutants


def load(path: str) -> ModuleType:
    name = Path(path).name
    loader = SourceFileLoader(name, str(ROOT / path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


EXAMPLE = '''
def f(x: int = 3, y: list[int] = []) -> int:
    """Nothing of 1 + 1 here."""
    if not x < 2:
        raise ValueError(f"got {x + 1}")
    return -y[x:] @ 0.5 + y[:, x]

TWO = 1 + 1
twice = lambda x: x * TWO

class A:
    def g(self):
        return lambda t: t ** 3 if self and t is None else {"a": True}
'''


def test_mutants_of_an_example(tmp_path: Path) -> None:
    mutate = load("scripts/mutate.py")
    file = tmp_path / "example.py"
    file.write_text(EXAMPLE)
    found = {(m.function, m.line, m.after) for m in mutate.mutants(file)}
    branch = "t ** 3 if self and t is None else {'a': True}"
    assert found == {
        ("f", 4, "x < 2"),
        ("f", 4, "not x <= 2"),
        ("f", 4, "not x >= 2"),
        ("f", 4, "not x < 3"),
        ("f", 6, "-y[x:] @ 0.5 - y[:, x]"),
        ("f", 6, "0.5 @ -y[x:] + y[:, x]"),
        ("f", 6, "y[x:] @ 0.5 + y[:, x]"),
        ("f", 6, "-y[:] @ 0.5 + y[:, x]"),
        ("f", 6, "-y[x:] @ 1.5 + y[:, x]"),
        ("<lambda>", 9, "lambda x: x / TWO"),
        ("A.g", 13, branch.replace("**", "*")),
        ("A.g", 13, branch.replace("3", "4")),
        ("A.g", 13, "self or t is None"),
        ("A.g", 13, "self and t is not None"),
    }


def test_a_mutant_takes_the_place_of_live_code(tmp_path: Path) -> None:
    mutate = load("scripts/mutate.py")
    file = tmp_path / "example.py"
    file.write_text("def outer():\n    step = 2\n    return lambda x: x + step\n\ndef other(x):\n    return x * 2\n")
    names: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), names)
    inner, alias = names["outer"](), names["other"]
    plus = next(m for m in mutate.mutants(file) if m.after.endswith("x - step"))
    mutate.install(mutate.exchange(file, plus.tree), [names["outer"], inner, alias])
    assert (inner(5), names["outer"]()(5), alias(5)) == (3, 3, 10)


def test_listed_survivors_are_read_as_they_are_written() -> None:
    script = load_mutants()
    cells = ("packages/fedloom/src/fedloom/a.py", "A.f", "a | b", "a & b")
    assert script.accepted(script.row(cells, "the same set")) == {cells: "the same set"}
    assert script.accepted(script.row(cells, "")) == {}


def load_mutants() -> ModuleType:
    before = dict(os.environ)
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return load("scripts/mutants")
    finally:
        sys.path.remove(str(ROOT / "scripts"))
        os.environ.clear()
        os.environ.update(before)


def test_a_method_is_one_short_file() -> None:
    """`_base` and its neighbours, and the presets, are no methods. FIAELT measures L, and has its public code's way."""
    files = [f for f in (SOURCE / "algorithms").glob("[!_]*.py") if f.stem != "presets"]
    lengths = {f.name: len(f.read_text().splitlines()) for f in files}
    assert {name: n for name, n in lengths.items() if n > (180 if name == "fiaelt.py" else 157)} == {}


def test_a_bill_of_materials_has_fedloom_itself_and_licenses() -> None:
    """Of every package that is installed here in the listed version, and of fedloom's own."""
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "scripts" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    sbom = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sbom)
    listed = re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", (ROOT / "requirements-deploy.txt").read_text(), re.MULTILINE)
    bill = {"components": [{"name": name, "version": version} for name, version in listed]}
    lacking = sbom.complete(bill)
    known = {c["name"]: c for c in bill["components"] if "licenses" in c}
    assert {name: known[name]["version"] for name in sbom.PACKAGES} == dict.fromkeys(sbom.PACKAGES, fl.__version__)
    assert bill["metadata"]["component"]["name"] == "fedloom-sites"
    assert {"torch", "flwr", "cryptography", "pycryptodome", "numpy"} <= {*known}
    assert len(known) + len(lacking) == len(listed) + len(sbom.PACKAGES)
    assert sbom.stated_license("torch", "0.0.1") == ""
    base = sbom.base_image("python:3.11@sha256:12ab\n")
    assert (base["name"], base["version"], base["hashes"][0]["content"]) == ("python", "3.11", "12ab")
