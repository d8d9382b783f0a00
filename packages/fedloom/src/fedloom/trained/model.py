"""An individual trained model, independent of the data and the run that it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedloom.data.dataset import Dataset, default_to_cpu
from fedloom.data.federation import Federation
from fedloom.data.input_spec import InputSpec
from fedloom.data.new_data import get_client_column
from fedloom.data.new_rows import new_rows
from fedloom.data.sources.table.levels import unapplied_factor_notes
from fedloom.data.tables import FAR_ROW_SHARE
from fedloom.errors import ConfigError, DataError, LayoutError, warn_user
from fedloom.local.oracles.forward import samples_per_evaluation
from fedloom.models import ModelSpec, make_spec
from fedloom.models.imported import InProcessModel, OwnModel, wrap_model
from fedloom.models.parts import BATCH_STATISTICS
from fedloom.rows.layout import Layout
from fedloom.storage.checkpoint import check_file_digest, save_tensors
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import make_folder
from fedloom.tasks import Objective, make_task
from fedloom.tasks.calibration import recalibrate
from fedloom.trained.files import check_model_file
from fedloom.trained.raw import RawModel, decide_labels

TENSOR_FIELDS = ("rows", "statistics", "fitted", "calibration")
BASE_PREFIX = "base."
"""Prefix of the tensors that contain a model's state before training, in a file with one model."""


@dataclass(frozen=True)
class ModelRecipe:
    """Architecture of a run's models, and facts about the data.

    Attributes:
        spec: the architecture.
        facts: facts about the run's training data.
        seed: seed of the initial values.
        dtype: dtype of the parameters and samples.
        objective: training objective and metrics, if they differ from the target's defaults.
        base: saved state dict before training. Set if rows do not contain the whole model, or if training started from
            a weight file (see `start`).
    """

    spec: ModelSpec
    facts: InputSpec
    seed: int
    dtype: torch.dtype = torch.float32
    objective: Objective = Objective()  # noqa: RUF009  # frozen
    base: Mapping[str, Tensor] | None = None

    def build(self) -> nn.Module:
        """Build the untrained module in evaluation mode."""
        facts = self.facts
        spec = self.spec if self.base is None else self.spec.with_(init_from=None)
        module = spec.build(facts.shape, facts.outputs, self.seed, facts.tokens).to(self.dtype).eval()
        if self.base is not None:
            module.load_state_dict(self.base)
        return module

    def start(self) -> dict[str, Tensor]:
        """Return the tensors saved once for all rows: the initial state dict, unless the seed determines it."""
        module = self.build()
        own_buffers = isinstance(self.spec, InProcessModel) and any(True for _ in module.buffers())
        if self.spec.init_from is None and all(p.requires_grad for p in module.parameters()) and not own_buffers:
            return {}
        return dict(module.state_dict())

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of the model's parameters."""
        return Layout.create(self.build())

    def header(self, about: Mapping[str, object]) -> dict[str, str]:
        """Return the metadata of a model file: ``layout``, ``facts`` and ``about`` as JSON."""
        return {**self.layout.header(), "facts": self.facts.model_dump_json(), "about": json.dumps(dict(about))}


@dataclass(frozen=True, eq=False)
class Model:
    """An individual trained model.

    Attributes:
        recipe: recipe for building the model.
        row: parameters of the model ``[d]``.
        statistics: means and variances ``[b]`` of the model's batch normalization. Empty if it has none.
        fitted: values fitted at the model's client to prepare a table's columns, ``[p, .]``. None if they are unknown.
        about: method, algorithm, seed, kind, client and round, if they are known.
        calibration: slope and intercept ``[2]`` that recalibrate the model's logits. If None, logits are unchanged.
    """

    recipe: ModelRecipe
    row: Tensor
    statistics: Tensor
    fitted: Tensor | None
    about: Mapping[str, Any]
    calibration: Tensor | None = None

    def __repr__(self) -> str:
        of = ", ".join(f"{key} {self.about[key]}" for key in ("method", "kind", "client", "seed") if key in self.about)
        return f"Model({of or 'unknown run'}: {type(self.recipe.spec).__name__}, {len(self.row):,} parameters)"

    def module(self) -> nn.Module:
        """Return the model as a plain `nn.Module` in evaluation mode.

        It expects samples that are scaled as described in `InputSpec`.
        """
        module = self.recipe.build()
        self.recipe.layout.load(module, self.row)
        load_statistics(module, self.statistics)
        return module

    @default_to_cpu()
    def raw(self, module: nn.Module | None = None) -> RawModel:
        """Return the model's module, or a given one, with its input and output steps (see `RawModel`).

        Raises:
            ConfigError: the scaling of the table's columns is unknown.
        """
        facts = self.recipe.facts
        if facts.table is not None and self.fitted is None:
            raise ConfigError(
                "each client scaled its columns separately, but this model has no scaling. Choose a "
                "client, or use adapt"
            )
        return RawModel(
            self.module() if module is None else module, facts, self.fitted, self.recipe.dtype, self.calibration
        ).eval()

    def predict(self, rows: object) -> NDArray[Any]:
        """Return the names of predicted classes ``[N]``, or predicted values ``[N]`` (``[N, k]`` for several targets).

        If there is a label per position, the shape is ``[N, L]``, and padding positions are included.

        Args:
            rows: unlabeled rows, of any type that `fedloom.data.new_rows.new_rows` accepts. Columns are multiplied by
                the factors in the ``[data]`` table used for training. If factors differ between clients, a column must
                name each row's client.

        Raises:
            DataError: the columns, shape or values differ from the training data, or factors differ between clients and
                there is no client column.
            ConfigError: the scaling of the table's columns is unknown.
        """
        return decide_labels(self.recipe.facts, self.scores(self._raw_rows(rows)))

    def predict_proba(self, rows: object) -> NDArray[np.float64]:
        """Return probabilities ``[N, C]``, with the classes in the order of ``recipe.facts.classes``.

        The arguments and errors are the same as for `predict`.

        If there is a label per position, the shape is ``[N, L, C]``. For a multilabel task, return the probabilities of
        the labels.

        Raises:
            ConfigError: the task has no classes, or `predict` would raise this error.
        """
        facts = self.recipe.facts
        if not facts.classes:
            raise ConfigError(f"a {facts.task} task has no class probabilities. Use predict")
        return self.scores(self._raw_rows(rows))

    def _raw_rows(self, rows: object) -> Tensor:
        """Return unlabeled rows as raw samples in the training data's units."""
        facts, conversion = self.recipe.facts, self.about.get("conversion", {})
        users, factors = get_client_column(conversion), conversion.get("factors", {})
        new = new_rows(facts, rows, users=users, factors=factors, days_since=conversion.get("days_since"))
        if (
            new.sites is None
            and not isinstance(rows, Dataset)
            and (problems := unapplied_factor_notes(factors, users, None))
        ):
            raise DataError(f"rows: {problems[0]}. Rename that column if it contains converted numbers")
        for note in new.unknown:
            warn_user(f"{note}. These cells are filled as in training")
        return self._warn_if_far(new.x)

    def _warn_if_far(self, x: Tensor) -> Tensor:
        """Return raw samples unchanged, and warn if most samples, or most values of a column, are far outside."""
        for sentence in self.note_outliers(x) if self.find_far(x) else ():
            warn_user(sentence)
        return x

    @default_to_cpu()
    @torch.no_grad()
    def outputs(self, x: Tensor) -> Tensor:
        """Return outputs ``[N, k]`` for raw samples (or ``[N, L, k]`` with a label per position, see `RawModel`)."""
        raw = self.raw()
        together = samples_per_evaluation(raw.module, raw.before(x[:1]).to(raw.takes))
        return torch.cat([raw.outputs(piece) for piece in x.split(together)])

    @default_to_cpu()
    def scores(self, x: Tensor) -> NDArray[np.float64]:
        """Return probabilities ``[N, C]`` or predicted values ``[N, k]`` for raw samples."""
        decisions: NDArray[np.float64] = self.raw().convert_outputs(self.outputs(x)).numpy()
        return decisions

    @default_to_cpu()
    def score(self, data: Dataset) -> dict[str, float]:
        """Compute the task's metrics for the model's predictions on all samples of new data.

        Args:
            data: labeled data with the columns and classes of the training data (some classes may be missing), as a
                data set or an argument of `Dataset.create`, such as arrays ``(x, y)``.

        Raises:
            DataError: the columns, classes or shape differ from the training data.
            ConfigError: the scaling of the table's columns is unknown.
        """
        facts = self.recipe.facts
        data = facts.labelled(data)
        return score_outputs(self.recipe, self.outputs(self._warn_if_far(facts.raw(data))), data)

    @default_to_cpu()
    def rescale(self, data: Dataset) -> Model:
        """Return the model with columns scaled by all rows of a table, as for a client with these rows.

        Raises:
            DataError: the table has different columns.
        """
        table = self.recipe.facts.table
        if table is None:
            return self
        x = self.recipe.facts.raw(data)
        everyone = torch.zeros(len(x), dtype=torch.long)
        return replace(self, fitted=table.fit(x, everyone, everyone == 0)[0])

    def note_outliers(self, x: Tensor) -> list[str]:
        """Return notes about columns ``[N, p]`` with values far from the training data (see `Table.strange`).

        For other samples, `InputSpec.note_far` provides the note.
        """
        table = self.recipe.facts.table
        if table is None:
            return self.recipe.facts.note_far(x)
        return [] if self.fitted is None else table.note_outliers(x, self.fitted)

    def find_far(self, x: Tensor) -> list[str]:
        """Return the columns ``[N, p]`` whose values are far outside the training data (see `Table.find_far`).

        For other samples, the name is "samples".
        """
        table = self.recipe.facts.table
        if table is None:
            return ["samples"] * (self.recipe.facts.find_far_share(x) > FAR_ROW_SHARE)
        return [] if self.fitted is None else table.find_far(x, self.fitted)

    def score_part(self, fed: Federation, part: str, client: int = 0) -> dict[str, float]:
        """Compute the metrics on one part of a client's samples, or return {} if this part is empty."""
        outputs, y, owner = self._part_outputs(fed, part, client)
        if not len(owner):
            return {}
        outputs = outputs if self.calibration is None else recalibrate(outputs, self.calibration)
        metrics = make_task(fed.data, self.recipe.objective).metrics(outputs, y, owner, 1)
        return {name: float(value) for name, value in metrics.items()}

    def line(self, fed: Federation, part: str, client: int = 0) -> Tensor:
        """Return the slope and intercept ``[2]`` for the model's outputs on a client's part (see `Objective.line`)."""
        return self.recipe.objective.line(*self._part_outputs(fed, part, client), 1)[0]

    def _part_outputs(self, fed: Federation, part: str, client: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs before recalibration, the targets and the clients, for all samples of a part."""
        fed = fed.to(dtype=self.recipe.dtype)
        index = fed.indices(part, client)
        outputs = module_outputs(self.module(), fed, index) if len(index) else self.row.new_zeros(0, 1)
        return outputs, fed.targets(index), torch.zeros(len(index), dtype=torch.long)

    def save(self, path: Path | str, *, force: bool = False) -> Path:
        """Write a safetensors file with ``rows [d]`` and the layout in its header (see `load`).

        Args:
            path: the file. If fedloom has written the file, it is replaced.
            force: True to replace a file even if it is of a different kind.

        Raises:
            ConfigError: the path must not be written (see `fedloom.outputs.check_output_file`).
            CheckpointError: the disk is full or the write is rejected.
        """
        path = check_model_file(path, force=force)
        make_folder(path.parent)
        tensors = {"rows": self.row, "statistics": self.statistics, "fitted": self.fitted}
        tensors |= {"calibration": self.calibration}
        kept = {name: t for name, t in tensors.items() if t is not None and t.numel()}
        kept |= {f"{BASE_PREFIX}{name}": t for name, t in self.recipe.start().items()}
        save_tensors(path, kept, self.recipe.header(self.about))
        return path

    @classmethod
    def load(cls, path: Path | str, spec: ModelSpec | OwnModel | str, objective: Objective = Objective()) -> Model:  # noqa: B008  # frozen
        """Load a model from a file written by `save`.

        Args:
            path: the file.
            spec: the architecture, which a model file cannot choose, as a value, a name, or the user's own model.
            objective: objective that determines the metrics.

        Raises:
            LayoutError: the file does not contain a model, or its model has a different architecture.
            ConfigError: the architecture is invalid.
        """
        if not isinstance(spec, ModelSpec):
            spec = make_spec(spec) if isinstance(spec, str) else wrap_model(spec)
        with open_tensors(Path(path)) as file:
            facts, about = read_facts(file, Path(path))
            names = set(file.keys())
            if "rows" not in names:
                raise LayoutError(
                    f"{path} does not contain exactly one model (it has no tensor 'rows'). It contains "
                    f"{', '.join(sorted(names))}"
                )
            tensors = {name: file.get_tensor(name) for name in TENSOR_FIELDS if name in names}
            base = {
                name.removeprefix(BASE_PREFIX): file.get_tensor(name) for name in names if name.startswith(BASE_PREFIX)
            }
        recipe = ModelRecipe(spec, facts, int(about.get("seed", 0)), tensors["rows"].dtype, objective, base or None)
        check_layout(file_layout(path), recipe.layout, Path(path))
        empty = torch.zeros(0, dtype=recipe.dtype)
        return cls(
            recipe,
            tensors["rows"],
            tensors.get("statistics", empty),
            tensors.get("fitted"),
            about,
            tensors.get("calibration"),
        )


def score_outputs(recipe: ModelRecipe, outputs: Tensor, data: Dataset) -> dict[str, float]:
    """Compute the task's metrics from outputs ``[N, k]`` or ``[N, L, k]`` for all targets of new data."""
    inputs = recipe.facts.take(data)
    y = inputs.y.flatten() if inputs.classed else inputs.y.to(recipe.dtype)
    owner = torch.zeros(len(inputs), dtype=torch.long)
    values = make_task(inputs, recipe.objective).metrics(outputs.flatten(0, -2), y, owner, 1)
    return {name: float(value) for name, value in values.items()}


@torch.no_grad()
def module_outputs(module: nn.Module, fed: Federation, index: Tensor) -> Tensor:
    """Return a module's outputs ``[b, k]`` for samples of a federation.

    If there is a label per position, the shape is ``[b L, k]``.
    """
    together = samples_per_evaluation(module, fed.fetch(index[:1]))
    return torch.cat([module(fed.fetch(piece)).flatten(0, -2) for piece in index.split(together)])


def running_statistics(module: nn.Module) -> list[Tensor]:
    """Return the batch normalization buffers used in evaluation, in module order."""
    normalisers: Any = [m for m in module.modules() if isinstance(m, BATCH_STATISTICS)]
    return [s for m in normalisers for s in (m.running_mean, m.running_var) if s is not None]


def load_statistics(module: nn.Module, statistics: Tensor | None) -> None:
    """Set a module's running statistics from a single vector.

    A module without running statistics is unchanged.
    """
    places = running_statistics(module)
    values = () if statistics is None or not places else statistics.split([place.numel() for place in places])
    for place, value in zip(places, values, strict=True):
        place.copy_(value.view_as(place))


def open_tensors(path: Path, *, check: bool = True) -> Any:
    """Open a safetensors file for reading.

    Raises:
        LayoutError: the file does not exist or is damaged.
    """
    try:
        file = safe_open(check_regular_file(path), "pt")
        if check:
            check_file_digest(path)
        return file
    except (OSError, SafetensorError) as error:
        raise LayoutError(
            f"{path} is not a readable file of models ({error}). Write the file again with 'fedloom run'"
        ) from None


def file_layout(path: Path | str) -> Layout:
    """Read the layout in a file's header.

    Raises:
        LayoutError: the header does not contain a layout.
    """
    with open_tensors(Path(path), check=False) as file:
        return Layout.read_header(file.metadata() or {})


def read_facts(file: Any, path: Path) -> tuple[InputSpec, dict[str, Any]]:
    """Read the facts about the data and the models from a file's header.

    Raises:
        LayoutError: the header does not contain readable facts.
    """
    header = file.metadata() or {}
    try:
        return InputSpec.model_validate_json(header["facts"]), dict(json.loads(header["about"]))
    except (KeyError, ValueError, TypeError) as error:
        raise LayoutError(f"{path}: the header does not describe the models' data ({error!r:.120})") from None


def check_layout(layout: Layout, wanted: Layout, path: Path) -> None:
    """Raise an error if a file's models do not have the expected architecture.

    Raises:
        LayoutError: the layouts differ. The message states the first difference.
    """
    if layout == wanted:
        return
    shapes_wanted = dict(zip(wanted.names, wanted.shapes, strict=True))
    shapes_in_file = dict(zip(layout.names, layout.shapes, strict=True))
    name = next(n for n in [*shapes_wanted, *shapes_in_file] if shapes_wanted.get(n) != shapes_in_file.get(n))
    texts = [list(of[name]) if name in of else "nothing" for of in (shapes_in_file, shapes_wanted)]
    raise LayoutError(
        f"{path} contains a model with a different layout: {name!r} is {texts[0]} in the file and "
        f"{texts[1]} in the run's model. Use a model of this run"
    )
