"""Setups and cells of the map, as declared in ``setups.toml``.

A cell is a method in a setup. Settings of the method are searched by `fedloom.lab.tune` on validation data. Every
method has the same number of full-length trials, one search space, and separate seeds for the trials. The cell is then
run with new seeds.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from fedloom.algorithms import REGISTRY, Algorithm, Preset
from fedloom.lab.experiment import Experiment, Tune, parse
from fedloom.rundir import file_name
from fedloom.storage import read_toml
from fedloom.values import choose, dump_value, make
from fedloom_studies.reproduce.recipe import merge_tables, restore_recorded

Scale = Literal["smoke", "full"]
Protocol = Literal["rounds", "gradients"]
"""Basis for comparing runs: equal numbers of rounds, or equal numbers of gradients (those of FedAvg)."""
SEED_KEYS = ("tuning", "seeds", "further", "plan", "again")
"""Entries of a setup that contain seeds, or numbers of seeds."""
POOLED_METHOD = "centralized"
NOTE_FUNCTIONS = ("check", "remarks")
"""Functions of a method that return notes for the user."""
NOTE_DECLARATION = "needs"
"""Attribute of a method that lists options without an effect, for notes."""
REFERENCE_METHODS = ("local", "fedavg", POOLED_METHOD)
"""Reference methods for all other methods: no collaboration, one model for all clients, and all data in one place."""


@dataclass(frozen=True)
class Setup:
    """A federation and the training of its clients.

    Attributes:
        title: title for readers, which states what distinguishes the clients.
        says: sentence that describes how the federation was constructed.
        share: core-minutes that all cells of the setup may take together at equal rounds.
        trials: number of trials per method. If there is only one trial, all methods run with their default settings.
        tuning: seeds for the trials.
        seeds: seeds of the results.
        again: seeds for a second run, which confirms verdicts.
        space: search space for every method, added to the default spaces.
        document: content of an experiment file, without methods.
        references: True if scikit-learn models are also fitted (see `fedloom_studies.map.references`).
        methods: methods that are run in the setup. If empty, all methods of the protocol are run.
    """

    name: str
    title: str
    says: str
    share: float
    trials: int
    tuning: tuple[int, ...]
    seeds: tuple[int, ...]
    again: tuple[int, ...]
    space: dict[str, Any]
    document: dict[str, Any]
    references: bool = False
    further: tuple[int, ...] = ()
    plan: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Seeds for the results at equal rounds: first every setup's seeds, then each planned stage's seeds."""
        return tuple((*self.seeds, *self.further)[:count] for count in (len(self.seeds), *self.plan))

    @property
    def ranks(self) -> bool:
        """True if the setup is included in ranks over setups, because its methods are run with tuned settings."""
        return self.trials > 1

    def decide_share(self, protocol: Protocol) -> float:
        """Return the maximum core-minutes for all cells of a protocol, in proportion to the number of methods."""
        return round(self.share * len(list_methods(protocol)) / len(REGISTRY), 1)

    @property
    def network(self) -> str:
        """Phrase that describes the model."""
        model = ", ".join(f"{key} {value}" for key, value in self.document["model"].items() if key != "kind")
        return f"{self.document['model']['kind']}{f' ({model})' if model else ''}"

    @property
    def training(self) -> str:
        """Sentences about the model, the number of rounds and the tuning."""
        tuned = f"with {self.trials} tuning trials per method" if self.trials > 1 else "with default settings"
        return f"The model is {self.network}. All methods train for {self.document['rounds']} rounds {tuned}."


def read_setups(scale: Scale) -> dict[str, Setup]:
    """Return all setups of a scale, keyed by name, in the order of the file."""
    declared = _read_setup_file()
    change = declared["smoke"] if scale == "smoke" else {}
    names = change.pop("setups", declared["setup"])
    by_name = {}
    for name in names:
        declared_setup = merge_tables(
            {**declared["base"], **declared["protocol"]}, merge_tables(declared["setup"][name], change)
        )
        plain: dict[str, Any] = {key: declared_setup.pop(key) for key in ("title", "says", "share", "trials")}
        seeds: dict[str, Any] = {key: tuple(declared_setup.pop(key)) for key in SEED_KEYS}
        by_name[name] = Setup(
            name, **plain, **seeds, space=declared["space"], references=declared_setup.pop("references", False),
            document=declared_setup,
        )  # fmt: skip
    return by_name


def wider_setups(scale: Scale) -> dict[str, Setup]:
    """Return the setups that also run methods with a wider model, with this model and the setups' first seeds."""
    declared = _read_setup_file()["wider"]
    rivals, wider = list_methods("gradients")[: declared["rivals"]], {}
    for name, setup in read_setups(scale).items():
        if name not in declared["without"]:
            wider[name] = replace(
                setup, title=f"{setup.title}, wider model", share=declared["share"], plan=(),
                methods=(*declared["heads"], *(rivals if name in declared["compared"] else ())),
                document=merge_tables(setup.document, {"model": declared["model"]}),
            )  # fmt: skip
    return wider


def wider_heads() -> tuple[str, ...]:
    """Return the methods with closed-form heads, which run with the wider model in every setup that has one."""
    return tuple(_read_setup_file()["wider"]["heads"])


def rule_cells() -> Iterator[tuple[str, Cell]]:
    """Yield the name and the cell of each method for every combination of aggregation rule and attack.

    The setup of an attacked cell is named after the attack. A method that uses the plain mean keeps its own name.
    """
    declared = _read_setup_file()["rules"]
    base = read_setups("full")[declared["setup"]]
    for attack, forged in declared["attacks"].items():
        for rule, aggregator in declared["aggregators"].items():
            document = {**base.document, "attack": forged} | ({"aggregator": aggregator} if rule != "mean" else {})
            setup = replace(base, name=attack, title=attack, trials=1, plan=(), document=document)
            for method in declared["methods"]:
                if rule == "mean":
                    yield method, Cell(setup, method)
                elif method not in REFERENCE_METHODS[:1]:
                    yield f"{method} + {rule}", Cell(setup, method)


def rule_settings() -> str:
    """Return the name of the setup that provides the chosen settings for methods with aggregation rules."""
    return str(_read_setup_file()["rules"]["settings"])


def _read_setup_file() -> dict[str, Any]:
    return tomllib.loads(files("fedloom_studies.map").joinpath("setups.toml").read_text(encoding="utf-8"))


def list_network_parts() -> dict[str, dict[str, Any]]:
    """Return the extra parts of the network that methods need in every setup, keyed by method."""
    parts: dict[str, dict[str, Any]] = _read_setup_file()["models"]
    return parts


def list_methods(protocol: Protocol) -> tuple[str, ...]:
    """Return the methods that a protocol runs in every setup, starting with the reference methods."""
    if protocol == "rounds":
        return tuple(dict.fromkeys([*REFERENCE_METHODS, *REGISTRY]))
    return (*REFERENCE_METHODS[:2], "fedavg-ft", *_read_setup_file()["gradients"]["methods"])


@dataclass(frozen=True)
class Cell:
    """A method in a setup, under one of the two protocols.

    Attributes:
        method: name of a registered method, or import path.
        space: search space for the method's settings, added to the default spaces.
        protocol: basis for comparing its trials and runs with FedAvg's.
    """

    setup: Setup
    method: str
    space: dict[str, Any] = field(default_factory=dict)
    protocol: Protocol = "rounds"

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that the cell runs for its results. Plans apply to equal rounds only."""
        return self.setup.stages[-1] if self.protocol == "rounds" else self.setup.seeds

    @property
    def where(self) -> str:
        """The cell's name in messages to the user."""
        return f"{self.method} in {self.setup.name}{' at equal gradients' if self.protocol == 'gradients' else ''}"

    @property
    def file(self) -> Path:
        """Relative path of the folder for the cell's runs."""
        place = Path(self.setup.name, file_name(self.method))
        return place if self.protocol == "rounds" else self.protocol / place

    @property
    def document(self) -> dict[str, Any]:
        """Content of the experiment file with the seeds for the results, before the settings have been chosen."""
        method: dict[str, Any] = {"algorithm": self.method, "label": self.method}
        if parts := list_network_parts().get(self.method):
            method["model"] = {**self.setup.document["model"], **parts}
        return {**self.setup.document, "name": self.where, "seeds": list(self.setup.seeds), "method": [method]}

    @property
    def search(self) -> dict[str, Any]:
        """Content of the experiment file for tuning the method."""
        plain = {"model": "best-on-validation", "prune": False, "equal_work": self.protocol == "gradients"}
        space = {"all": self.setup.space} | ({self.method: self.space} if self.space else {})
        tune = {"trials": self.setup.trials, "seeds": list(self.setup.tuning), **plain, "space": space}
        return {**self.document, "tune": tune}

    @cached_property
    def plan(self) -> Experiment:
        """Experiment for tuning the method.

        Raises:
            ConfigError: the method does not exist, or does not have one of these settings.
        """
        return parse(self.search, self.where)

    @cached_property
    def digest(self) -> str:
        """Digest of all inputs that determine the results, except the code, followed by the number of trials."""
        from fedloom.lab.tune import build_search_space

        space = build_search_space(self.plan.methods[0], self.plan.tune, self.where)
        resolved = {key: list(d) if isinstance(d, tuple) else dump_value(d) for key, d in space.items()}
        search = restore_recorded({**self.search, "tune": {**self.search["tune"], "trials": None}})
        text = hashlib.sha256(json.dumps([search, resolved], sort_keys=True).encode()).hexdigest()[:16]
        return f"{text}-{self.setup.trials}"

    @cached_property
    def source(self) -> str:
        """Digest of the code of the method. For a preset, the digest covers the code of all its parts.

        Words do not affect results, so they are omitted: docstrings, sentences, descriptions of options, error
        messages, and the functions and declarations (`needs`) from which notes follow. Imports are omitted too: the
        code names what it uses.
        """
        entry: Any = choose("algorithm", REGISTRY, self.method, base=Algorithm)
        parts = entry.parts if isinstance(entry, Preset) else [entry]
        trees = [ast.parse(inspect.getsource(sys.modules[part.__module__])) for part in parts]
        return hashlib.sha256("".join(ast.unparse(_WordRemover().visit(tree)) for tree in trees).encode()).hexdigest()[
            :16
        ]


class _WordRemover(ast.NodeTransformer):
    """Transformer that removes the text that users read, and the imports, from a module's syntax tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_docstring = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_docstring else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return None if node.name in NOTE_FUNCTIONS else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return None if ast.unparse(node.target) == NOTE_DECLARATION else self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | None:
        return None if ast.unparse(node.target) == NOTE_DECLARATION else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args = []
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST | None:
        return None if node.arg == "description" else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")

    def visit_Import(self, node: ast.AST) -> None:
        return None

    visit_ImportFrom = visit_Import


def space_from(path: Path, method: str) -> dict[str, Any]:
    """Read a search space from a file.

    The entries of the file have the form ``setting = [choices]`` or ``{low, high, log}``, as in ``[tune.space.NAME]``.

    Raises:
        ConfigError: the file cannot be read, names a setting that the method does not have, or does not define a valid
            space for a setting.
    """
    from fedloom.lab.tune import build_search_space, check_values

    space = read_toml(path, "search space")
    make(Tune, {"space": {method: space}}, str(path), Tune.model_fields)
    cell = Cell(next(iter(read_setups("smoke").values())), method, space)
    check_values(cell.document, 0, build_search_space(cell.plan.methods[0], cell.plan.tune, str(path)), str(path))
    return space
