"""Recipe: a paper's table or figure as one declarative file, which contains an experiment and the paper's claims.

A recipe is an experiment file with these additional keys and tables:

- ``base = "NAME"``: another recipe that this recipe extends. Tables are merged key by key. If the ``kind`` or
  ``source`` of a table differs, the table replaces the base's table. Values that are not tables always replace the
  base's values. Columns and cells are replaced as a whole, and new columns also remove the previous cells.
  ``[scale.laptop]``, ``nearest`` and ``rivals`` are not inherited.
- ``[paper]``: source of the printed numbers, and the claims (see `Paper`).
- ``[variant.NAME]``: changes to the experiment. Each variant has its own run directory. ``options.LABEL`` changes a
  single method. If there are no variants, a single variant is called ``all``. ``variants = [...]`` keeps the variants
  in the list, and removes the base's other variants.
- ``[scale.NAME]``: changes for the scale smoke, laptop or full, which are applied after the changes of a variant.
  ``variants`` and ``methods`` restrict the run to the listed ones, ``options.LABEL`` changes a single method,
  ``budget`` is a limit in core-minutes, and `SENTENCE_KEY` is a sentence for the page.
- ``choose = {KEY = [values]}`` in a ``[[method]]``: candidates, of which `fedloom.lab.tune` chooses one on validation
  data (see `choices`).
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, Field, model_validator

from fedloom.errors import ConfigError
from fedloom.lab.experiment import restore_document
from fedloom.rundir import get_label
from fedloom.values import Value, choose, make

Scale = Literal["smoke", "laptop", "full"]
RECIPE_SCALES: tuple[Scale, ...] = get_args(Scale)
SENTENCE_KEY = "says"
"""Key of the sentence that states how a scale differs from the protocol."""
SINGLE_VARIANT = "all"
"""Name of the only variant if a recipe declares no variants."""
SMOKE_CHOICES = {
    "data": {"source": "digits"},
    "partition": {"min_size": 1, "max_train_per_client": 20},
    "rounds": 2,
    "evaluate": {"every": 1},
}
"""Changes that apply to every recipe at smoke scale, unless the recipe declares its own."""


class NominalDataset(NamedTuple):
    """Data set of a paper: numbers of training and test samples, shape of a sample, classes, and natural clients."""

    train: int
    test: int
    shape: tuple[int, ...]
    classes: int
    users: int = 0


FOLLOWS_PROTOCOL_PHRASE, REDUCED_PHRASE = "as in the protocol", "as reduced"
"""Recorded phrases for runs that follow the protocol, and for runs that are reduced as the recipe describes."""
NOMINAL_SETS = {
    "cifar-10": NominalDataset(50_000, 10_000, (3, 32, 32), 10),
    "cifar-100": NominalDataset(50_000, 10_000, (3, 32, 32), 100),
    "digits": NominalDataset(1797, 0, (1, 8, 8), 10),
    "fedloom_studies.others.sources:AflAdult": NominalDataset(32_561, 16_281, (99,), 2, 2),
    "fedloom_studies.others.sources:AflFashion": NominalDataset(18_000, 3_000, (784,), 3, 3),
    "fedloom_studies.others.sources:FlambyBrca": NominalDataset(866, 222, (39,), 0, 6),
    "fedloom_studies.others.sources:FlambyHeart": NominalDataset(486, 254, (13,), 2, 4),
    "fashion-mnist": NominalDataset(60_000, 10_000, (1, 28, 28), 10),
    "femnist": NominalDataset(14_708, 1685, (1, 28, 28), 62, 105),
    "medical-mnist": NominalDataset(58_954, 0, (1, 64, 64), 6),
    "mnist": NominalDataset(60_000, 10_000, (1, 28, 28), 10),
    "synthetic": NominalDataset(13_500, 1_500, (60,), 10, 30),
    "tiny-imagenet": NominalDataset(100_000, 10_000, (3, 64, 64), 200),
}


class Claim(Value):
    """Order of two references ``[VARIANT |] METHOD: MODEL[: FIGURE]``, as claimed in the paper.

    If no variant is given, the claim is judged in every variant that contains the methods. The module `figures`
    describes the figures.
    """

    text: str = Field(description="the paper's claim, in its own words if they are short")
    higher: str | None = Field(None, description="reference that should be higher. Set either this or lower")
    lower: str | None = Field(None, description="reference that should be lower. Set either this or higher")
    than: tuple[str | float, ...] = Field(
        min_length=1, description="references or numbers that the claim compares with"
    )
    margin: float = Field(
        0.0, ge=0, description="largest disadvantage that does not refute the claim, in the figure's unit"
    )
    equivalent: bool = Field(False, description="true if the paper claims an absolute difference of at most the margin")
    most: bool = Field(
        False, description="true if the claim covers more than half of the references instead of every reference"
    )
    each: bool = Field(False, description="true if the claim covers each variant instead of the mean of all variants")
    spread: bool = Field(False, description="true if the claim covers standard deviations over seeds instead of means")
    construction: bool = Field(
        False, description="true if the claim holds by construction, regardless of the methods' results"
    )
    variants: tuple[str, ...] = Field((), description="variants covered by the claim (empty: all)")

    @model_validator(mode="after")
    def _one_side(self) -> Claim:
        if (self.higher is None) == (self.lower is None):
            raise ValueError("set higher or lower, but not both")
        if self.equivalent and not self.margin:
            raise ValueError("a claim of equivalence needs a margin")
        if self.spread and not all(isinstance(side, str) for side in self.than):
            raise ValueError("a claim about standard deviations must compare references, not numbers")
        return self

    @property
    def subject(self) -> str:
        """Reference that is higher or lower according to the claim."""
        return self.higher or self.lower or ""


class UnstatedDetail(Value):
    """Detail that a protocol leaves open, with the value that was chosen and the reason for this choice."""

    what: str
    choice: str
    reason: str


Cell = Annotated[float | tuple[float, float] | None, BeforeValidator(lambda cell: None if cell == [] else cell)]


class Paper(Value):
    """What the paper states about the table or figure."""

    title: str = Field(description="name of the paper and number of its table or figure")
    protocol: str = Field(description="the protocol, as the paper states it")
    order: int = Field(description="position in the list of all recipes")
    mode: Literal["published", "fair", "near"] = Field(
        "near",
        description=(
            "published: the paper's settings, its code's variants, and its way of choosing settings "
            "and models. fair: equal numbers of trials and stated budgets. near: the stated "
            "protocol, with the same choices for all methods where the protocol is silent"
        ),
    )
    table: str = Field(
        "",
        description="name of a table by other authors, as on the page of these tables (empty: a table of the papers)",
    )
    gap_limit: float = Field(
        0.0, ge=0, description="for a table by other authors: the largest difference that counts as close"
    )
    explained: dict[str, str] = Field(
        default_factory=dict, description="for a table by other authors: the cause of a larger difference, by column"
    )
    nearest: str = Field(
        "", description="name of a recipe that is closer to the protocol and includes this recipe's results"
    )
    rivals: str = Field(
        "", description="name of a recipe of the same experiment, whose record contains the other methods of the claims"
    )
    figure: str = Field("accuracy", description="figure of a reference that does not name one")
    percent: bool = Field(False, description="whether the paper prints its values in percent")
    seeds: int = Field(1, ge=1, description="number of repetitions behind a printed value")
    columns: dict[str, str] = Field(default_factory=dict, description="title and reference of every column")
    cells: dict[str, tuple[Cell, ...]] = Field(
        default_factory=dict,
        description="a mean or (mean, standard deviation) per column, by variant ([]: no printed value)",
    )
    claims: tuple[Claim, ...] = ()
    unknown: tuple[UnstatedDetail, ...] = ()
    fixed: dict[str, str] = Field(
        default_factory=dict, description="options that a fair recipe does not tune, by method, with the reason"
    )
    stated: tuple[str, ...] = Field(
        (), description="details that the base recipe leaves open and this recipe specifies"
    )
    reduced: str | None = Field(None, description="how the data set or the run is smaller than in the protocol")
    samples: int | None = Field(None, ge=1, description="number of samples of the reduced data set")
    stand_in: str = Field("", description="data, features or network in place of the paper's (empty: the paper's own)")
    tried: tuple[str, ...] = Field((), description="attempts to explain a claim that does not hold")

    @model_validator(mode="after")
    def _table_fits(self) -> Paper:
        for variant, row in self.cells.items():
            if len(row) != len(self.columns):
                raise ValueError(
                    f"the cells of {variant!r} contain {len(row)} values, but there are {len(self.columns)} columns"
                )
        foreign = set(self.stated) - {u.what for u in self.unknown}
        if foreign:
            raise ValueError(f"stated: no entry of `unknown` is named {', '.join(sorted(foreign))}")
        return self

    @property
    def kind(self) -> str:
        """Word that describes the recipe: either its mode or *stand-in*.

        A stand-in is never called *published*, and settles only claims about itself.
        """
        if not self.stand_in:
            return self.mode
        return "stand-in" if self.mode == "published" else f"stand-in, {self.mode}"

    @property
    def open(self) -> tuple[UnstatedDetail, ...]:
        """Details that neither the protocol nor this recipe states."""
        return tuple(u for u in self.unknown if u.what not in self.stated)


@dataclass(frozen=True)
class Recipe:
    """Recipe for a table or a figure of a paper. The function `read_recipes` returns all recipes."""

    name: str
    paper: Paper
    document: dict[str, Any]
    variants: dict[str, dict[str, Any]]
    scales: dict[str, dict[str, Any]]

    def budget(self, scale: Scale) -> float | None:
        """Return the time limit of a scale, in core-minutes. Return None if no limit is stated."""
        return self.scales.get(scale, {}).get("budget")

    def sentence(self, scale: Scale) -> str:
        """Return a sentence about how a scale differs from the protocol."""
        if scale == "smoke":
            return "handwritten digits in place of the data, hardly any rounds: shows only that the recipe runs"
        plain = FOLLOWS_PROTOCOL_PHRASE if self.paper.reduced is None else REDUCED_PHRASE
        return str(self.scales.get(scale, {}).get(SENTENCE_KEY, plain))

    def follows_paper(self, scale: Scale, samples: Mapping[str, int]) -> bool:
        """Return True if the runs at a scale follow the paper's protocol.

        The scale may have different seeds, and fewer variants or methods.

        Args:
            scale: scale of the run.
            samples: number of samples that the run used from every source, keyed by source. If a number is unknown or
                smaller than in the paper, the paper's protocol counts as not followed.
        """
        free = {"budget", SENTENCE_KEY, "seeds", "variants", "methods"}
        if scale == "smoke" or self.paper.reduced is not None or set(self.scales.get(scale, {})) - free:
            return False
        used = {document["data"]["source"] for document in self.make_documents(scale).values()}
        papers = {
            source: NOMINAL_SETS[source].train + NOMINAL_SETS[source].test for source in used & NOMINAL_SETS.keys()
        }
        return used == papers.keys() and all(samples.get(source, 0) >= size for source, size in papers.items())

    def ordered(self, seeds: Iterable[str]) -> list[str]:
        """Return the seeds in the order used by claims: the recipe's seeds, then all others, ascending."""
        places = {str(seed): k for k, seed in enumerate(self.document["seeds"])}
        return sorted(seeds, key=lambda seed: (places.get(seed, len(places)), int(seed)))

    def seeds(self, count: int) -> list[int]:
        """Return at least ``count`` seeds: the recipe's seeds, followed by the smallest unused numbers."""
        seeds_of_recipe = list(self.document["seeds"])
        return [*seeds_of_recipe, *(k for k in range(count) if k not in seeds_of_recipe)][
            : max(count, len(seeds_of_recipe))
        ]

    def protocol(self, scale: Scale) -> str:
        """Return a digest of the experiments at a scale, which matches results to this version of the recipe."""
        return digest_of(self.make_documents(scale))

    def make_documents(
        self, scale: Scale, seeds: Sequence[int] = (), only: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        """Return the experiment document of every variant, whose methods still contain ``choose``.

        Raises:
            ConfigError: the recipe does not contain a variant or a method with this name.
        """
        documents = {}
        change = {k: v for k, v in self.scales.get(scale, {}).items() if k not in ("budget", SENTENCE_KEY)}
        for variant in change.pop("variants", list(self.variants)[: 1 if scale == "smoke" else None]):
            variant_options = dict(choose("variant", self.variants, variant, self.name))
            options = merge_tables(variant_options.pop("options", {}), change.get("options", {}))
            document = merge_tables(self.document, variant_options)
            document = merge_tables(document, SMOKE_CHOICES) if scale == "smoke" else document
            document = merge_tables(document, {k: v for k, v in change.items() if k not in ("methods", "options")})
            methods = [merge_tables(m, options.get(get_label(m), {})) for m in document["method"]]
            named = {get_label(m): m for m in methods}
            wanted = [choose("method", named, label, self.name) for label in only or change.get("methods", named)]
            seeds_here = list(seeds) or (document["seeds"][:1] if scale == "smoke" else document["seeds"])
            document |= {"method": wanted, "seeds": seeds_here, "name": f"{self.name}, {variant}"}
            documents[variant] = document
        return documents


def merge_tables(base: Mapping[str, object], change: Mapping[str, object]) -> dict[str, Any]:
    """Return ``base`` with the changes in ``change`` merged into it, table by table."""
    result = deepcopy(dict(base))
    for key, value in change.items():
        old = result.get(key)
        if (
            isinstance(old, dict)
            and isinstance(value, dict)
            and not any(value.get(name, old.get(name)) != old.get(name) for name in ("kind", "source") if name in old)
        ):
            result[key] = merge_tables(old, value)
        else:
            result[key] = deepcopy(value)
    return result


def digest_of(document: object) -> str:
    """Return a digest of a JSON value as 16 hexadecimal digits.

    Experiments are first converted to the form of the oldest records.
    """
    if isinstance(document, Mapping):
        document = {key: restore_recorded(value) for key, value in restore_recorded(document).items()}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def restore_recorded(document: object) -> Any:
    """Convert an experiment document to the form that it had in the oldest records, with the original names of keys.

    At the time of these records, clients had uniform weights by default.
    """
    if not isinstance(document, Mapping):
        return document
    first = restore_document(document)
    return {key: value for key, value in first.items() if (key, value) != ("weights", "uniform")}


def recipe_names() -> Iterator[str]:
    """Yield the names of all recipes in the package."""
    for file in files("fedloom_studies.reproduce").joinpath("recipes").iterdir():
        if file.name.endswith(".toml"):
            yield file.name.removesuffix(".toml")


@cache
def read_recipes() -> dict[str, Recipe]:
    """Return all recipes, keyed by name, in the order of their runs."""
    documents = dict.fromkeys(recipe_names())
    by_name = {name: make_recipe(name, _resolve_document(name, documents)) for name in documents}
    return dict(sorted(by_name.items(), key=lambda item: (item[1].paper.order, item[0])))


def titles() -> list[tuple[str, str]]:
    """Return the names of all recipes, each with the title of its table or figure."""
    return [(name, recipe.paper.title) for name, recipe in read_recipes().items()]


def read_recipe(name: str) -> Recipe:
    """Return the recipe with a given name.

    Raises:
        ConfigError: no recipe has this name. The message suggests the most similar name.
    """
    return choose("recipe", read_recipes(), name)


def _resolve_document(name: str, documents: Mapping[str, object]) -> dict[str, Any]:
    """Return a recipe's document, merged with the documents of the recipes that it extends."""
    choose("recipe", documents, name)
    text = files("fedloom_studies.reproduce").joinpath("recipes", f"{name}.toml").read_text()
    document = tomllib.loads(text)
    if "base" not in document:
        return document
    base = _resolve_document(document.pop("base"), documents)
    base.get("scale", {}).pop("laptop", None)
    for key in ("nearest", "rivals"):
        base.get("paper", {}).pop(key, None)
    for table, follows in (("columns", ("columns", "cells")), ("cells", ("cells",))):
        if table in document.get("paper", {}):
            base["paper"] |= {key: {} for key in follows}
    return merge_tables(base, document)


def make_recipe(name: str, document: Mapping[str, Any]) -> Recipe:
    """Convert a resolved document to a recipe.

    Raises:
        ConfigError: [paper] or client_weights is missing, [paper] contains an invalid value, or a scale is unknown.
    """
    rest = deepcopy(dict(document))
    if "paper" not in rest:
        raise ConfigError(f"recipe {name}: the table [paper] is missing")
    if "client_weights" not in rest:
        raise ConfigError(
            f"recipe {name}: client_weights is missing. Set it to 'uniform' or 'samples', the weights of its clients"
        )
    paper = make(Paper, rest.pop("paper"), f"recipe {name}: [paper]", Paper.model_fields)
    scales, variants = rest.pop("scale", {}), rest.pop("variant", {}) or {SINGLE_VARIANT: {}}
    variants = {v: choose("variant", variants, v, f"recipe {name}") for v in rest.pop("variants", variants)}
    for scale in scales:
        choose("scale", dict.fromkeys(RECIPE_SCALES), scale, f"recipe {name}")
    return Recipe(name, paper, rest, variants, scales)
