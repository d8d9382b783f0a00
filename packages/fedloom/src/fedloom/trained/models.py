"""Models of a run in memory or in its directory, for predictions, export and new clients."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.data.dataset import Dataset, default_to_cpu
from fedloom.data.input_spec import single_client_federation
from fedloom.errors import ConfigError, warn_user
from fedloom.hints import suggest_nearest
from fedloom.local import LocalSGD
from fedloom.local.oracles.precision import isolate_torch_settings
from fedloom.outputs import check_output_folder
from fedloom.trained.adapt import adapt_model
from fedloom.trained.files import check_model_file
from fedloom.trained.model import Model, ModelRecipe, running_statistics
from fedloom.trained.model_source import ModelSource
from fedloom.trained.saved import model_file_names, write_models
from fedloom.values import has_type

MAX_NAMED_CLIENTS = 20
"""Maximum number of clients listed in a message."""
KIND_PREFERENCE = ("hybrid", "personal", "global")
"""Order of preference among a client's models. The first model that the method provides is used."""


class Models:
    """All models of a run.

    ``models["global"]`` is a module, and ``models.personal[i]`` is the module of the client with number i.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    def __repr__(self) -> str:
        name = type(self.recipe.spec).__name__
        return f"Models({', '.join(self.kinds())}: {name}, {len(self.names)} clients)"

    def __iter__(self) -> Iterator[str]:
        """Iterate over the kinds of models, so that ``"personal" in models`` tests for personal models."""
        return iter(self.kinds())

    @property
    def recipe(self) -> ModelRecipe:
        """Recipe for building the models, with the facts about their data."""
        return self._source.recipe

    @property
    def names(self) -> Sequence[str]:
        """Names of all clients."""
        return self._source.names

    @property
    def about(self) -> Mapping[str, Any]:
        """Facts about the run: method, algorithm, seed and number of rounds."""
        return self._source.about

    @property
    def fitted(self) -> Tensor | None:
        """Values fitted at each client to prepare a table's columns, ``[n, p, .]``.

        None if they are unknown.
        """
        return self._source.fitted

    def kinds(self) -> list[str]:
        """Return the kinds of models that the run provides, out of "global", "personal" and "hybrid"."""
        return self._source.kinds()

    @default_to_cpu()
    def rows(self, kind: str, clients: Tensor | Sequence[int] | None = None) -> Tensor:
        """Return the models ``[m, d]`` of some clients (None: all clients), or the global model ``[d]``, on the CPU.

        Raises:
            ConfigError: the method does not provide this kind of model, or the client does not exist.
        """
        ids = None if clients is None else torch.tensor([self._place(int(i)) for i in clients], dtype=torch.int64)
        return self._read_rows_and_statistics(kind, ids)[0]

    @default_to_cpu()
    def model(self, kind: str, client: int | str | None = None) -> Model:
        """Return a single model that can be evaluated, saved or exported.

        Args:
            kind: "global", "personal" or "hybrid".
            client: number or name of the client. For the global model, it determines only the scaling of a table's
                columns.

        Raises:
            ConfigError: the method does not provide this kind of model, or the client does not exist.
        """
        self._check(kind)
        if client is None and kind != "global":
            raise ConfigError(f"{kind} models belong to clients. Choose a client: {self.clients_phrase()}")
        place = None if client is None else self._place(client)
        row, statistics = self._read_rows_and_statistics(kind, None if place is None else torch.tensor([place]))
        row, statistics = (row, statistics) if kind == "global" else (row[0], statistics[0])
        fitted = self._source.fitted
        about = {**self._source.about, "kind": kind, **({} if place is None else {"client": self.names[place]})}
        calibration = None if fitted is None or place is None else fitted[place]
        return Model(self.recipe, row, statistics, calibration, about, self._line(kind, place))

    def _line(self, kind: str, place: int | None) -> Tensor | None:
        """Return a model's recalibration ``[2]`` at a client.

        If no client is given, return the medians over all clients.
        """
        if kind == "hybrid" and place is not None:
            kind = "global" if bool(self._source.takes_global()[place]) else "personal"
        lines = self._source.calibration(kind)
        if lines is None:
            return None
        return lines.nanquantile(0.5, dim=0) if place is None else lines[place]

    def ready(self, kind: str | None = None, client: int | str | None = None) -> Model:
        """Return a single model that accepts raw rows.

        A table's columns are scaled as at the given client or, if no client is given, jointly for all clients.

        Args:
            kind: "global", "personal" or "hybrid". If None, the client's best model, or the global model if no client
                is given.
            client: number or name of the client.

        Raises:
            ConfigError: the method does not provide this kind of model, or the client does not exist.
        """
        if kind is None:
            kind = "global" if client is None else next((k for k in KIND_PREFERENCE if k in self.kinds()), "global")
        if client is None and "global" not in self.kinds():
            raise ConfigError(f"{self.about['method']} has no global model. Choose a client: {self.clients_phrase()}")
        model, fitted = self.model(kind, client), self.fitted
        table = model.recipe.facts.table
        if table is None or model.fitted is not None or fitted is None:
            return model
        return replace(model, fitted=table.typical(fitted))

    def kinds_for(self, sites: Sequence[str] | None, client: object = None) -> list[str]:
        """Return the kinds of models that can predict some rows: all for clients of the run, otherwise only "global".

        Args:
            sites: client of each row, or None if unknown.
            client: client whose model makes all predictions. If None, each row's own client predicts it.
        """
        has_sites = client is not None or (sites is not None and set(sites) <= set(self.names))
        return [kind for kind in self.kinds() if has_sites or kind == "global"]

    @default_to_cpu()
    def predict(self, rows: object, client: int | str | None = None, kind: str | None = None) -> NDArray[Any]:
        """Return a single model's predictions for unlabeled rows.

        Args:
            rows: see `fedloom.data.new_rows.new_rows`.
            client: client whose model makes the predictions. If None, the global model is used.
            kind: kind of model, as in `ready`.

        Returns:
            Names of the predicted classes ``[N]``, or predicted values ``[N]`` (``[N, k]`` for several targets).

        Raises:
            DataError: the columns, shape or cells differ from the training data.
            ConfigError: the model or the client does not exist.
        """
        return self.ready(kind, client).predict(rows)

    @default_to_cpu()
    def predict_proba(
        self, rows: object, client: int | str | None = None, kind: str | None = None
    ) -> NDArray[np.float64]:
        """Return probabilities ``[N, C]``, with the classes in the order of ``recipe.facts.classes``.

        The arguments and errors are the same as for `predict`.
        """
        return self.ready(kind, client).predict_proba(rows)

    def module(self, kind: str, client: int | str | None = None) -> nn.Module:
        """Return a model as a plain `nn.Module` in evaluation mode."""
        return self.model(kind, client).module()

    def __getitem__(self, kind: str) -> nn.Module | Modules:
        """``models["global"]`` is a module, and ``models["personal"][i]`` is the module of client i."""
        self._check(kind)
        return self.module(kind) if kind == "global" else Modules(self, kind)

    @property
    def personal(self) -> Modules:
        """Personal modules of all clients."""
        self._check("personal")
        return Modules(self, "personal")

    @property
    def hybrid(self) -> Modules:
        """Modules of the hybrid models.

        For each client, this is the better one of its personal module and the global module.
        """
        self._check("hybrid")
        return Modules(self, "hybrid")

    @isolate_torch_settings()
    def adapt(
        self,
        data: Dataset,
        *,
        rounds: int = 1,
        epochs: int | None = None,
        steps: int | None = None,
        lr: float | None = None,
        holdout: float = 0.0,
    ) -> Model:
        """Train a personal model for a client that was not part of the run (see `fedloom.trained.adapt.adapt_model`).

        With ``[task] calibrate``, logits are recalibrated with the medians over the run's clients, because the new
        client has no validation set.

        Args:
            data: the new client's labeled data. The labels may cover only some of the run's classes.
            rounds: number of repetitions of the method's client step, at least 1.
            epochs: number of passes over the data per round, in place of the run's number. A method's separate numbers
                of epochs (FedSLR's phase II) are unchanged.
            steps: number of steps per round, in place of epochs.
            lr: step size, in place of the run's schedule.
            holdout: fraction of the samples to hold out from training, in [0, 1). If positive, ``about["scores"]``
                contains the metrics of the new model and the global model on these samples.

        Raises:
            ConfigError: the method does not provide personal models, or a value is out of range.
            DataError: the columns, classes or shape differ from the run's data.
            ClientError: the method's code raised an error.
        """
        data, side = self.recipe.facts.labelled(data), self._source.server()
        side = side._replace(local=_change_local_settings(side.local, epochs, steps, lr))
        new = self.recipe.facts.take(data)
        for sentence in self.recipe.facts.note_far(new.x):
            warn_user(sentence)
        fed = single_client_federation(new, holdout, side.seed)
        row, oracle = adapt_model(side, self.recipe, fed, rounds)
        oracle.set_statistics(row, torch.tensor([0]))
        statistics = [s.flatten() for s in running_statistics(oracle.module)]
        fitted = None if fed.data.fitted is None else fed.data.fitted.values[0]
        about = {**self._source.about, "kind": "adapted", "client": data.name}
        adapted_model = Model(self.recipe, row, torch.cat([row[:0], *statistics]), fitted, about)
        fitted_here = self.recipe.objective.line_part == "train"
        line = adapted_model.line(fed, "train") if fitted_here else self._line("personal", None)
        adapted_model = replace(adapted_model, calibration=line)
        scores = {"adapted": adapted_model.score_part(fed, "test")}
        if "global" in self.kinds():
            scores["global"] = self.model("global").score_part(fed, "test")
        samples = {"train": len(fed.indices("train", 0)), "test": len(fed.indices("test", 0))}
        more = {"rounds adapted": rounds, "samples": samples, **({"scores": scores} if scores["adapted"] else {})}
        return replace(adapted_model, about={**about, **more})

    def takes_global(self) -> Tensor:
        """Return a bool mask ``[n]`` of the clients whose hybrid model is the global model."""
        self._check("hybrid")
        return self._source.takes_global()

    def save(self, folder: Path | str) -> list[Path]:
        """Write every kind of model to ``<kind>.safetensors``, and the state for new clients to ``server.safetensors``.

        Each file's header contains the layout, the facts about the data and the clients' names. Models that fedloom
        wrote to this folder earlier are replaced.

        Raises:
            ConfigError: the folder belongs to a run or a deployment, or it contains other files with these names.
            CheckpointError: the disk is full or the write is rejected.
        """
        folder = check_output_folder(folder)
        for name in self.files():
            check_model_file(folder / f"{name}.safetensors")
        return self.save_in_run(folder)

    def save_in_run(self, folder: Path) -> list[Path]:
        """Write the same files as `save` to the run's own directory, as `fedloom run` does.

        Returns:
            Paths of the written files.
        """
        return write_models(self._source, folder)

    def files(self) -> list[str]:
        """Return the names of the files that `save` writes."""
        return model_file_names(self._source)

    def _read_rows_and_statistics(self, kind: str, clients: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return parameters and running statistics."""
        self._check(kind)
        source = self._source
        if kind == "global":
            return source.shared()
        ids = torch.arange(len(self.names)) if clients is None else clients
        personal = source.personal(ids)
        if kind == "personal":
            return personal
        takes_global = source.takes_global()[ids][:, None]
        row, statistics = (torch.where(takes_global, g, p) for g, p in zip(source.shared(), personal, strict=True))
        return row, statistics

    def _check(self, kind: str) -> None:
        if not has_type(kind, str) or kind not in self.kinds():
            name = self._source.about["algorithm"]
            raise ConfigError(f"{name} has no {kind!r} model. Its models: {', '.join(self.kinds()) or 'none'}")

    def _place(self, client: int | str) -> int:
        """Return the number of a client given by number or name."""
        names = self.names
        if isinstance(client, str) and client in names:
            return list(names).index(client)
        number = int(client) if re.fullmatch("[0-9]{1,18}", str(client)) else -1
        if not 0 <= number < len(names):
            raise ConfigError(f"unknown client {client!r}; {self.clients_phrase(client)}")
        return number

    def clients_phrase(self, client: object = "") -> str:
        """Return the last part of a sentence, which lists the clients."""
        names = self.names
        if len(names) <= MAX_NAMED_CLIENTS:
            return suggest_nearest(client, names)
        return f"there are {len(names)}: {', '.join(names[:MAX_NAMED_CLIENTS])}, ..."


class Modules:
    """Modules of one kind for all clients, each built when it is first used."""

    def __init__(self, models: Models, kind: str) -> None:
        self._models, self._kind = models, kind

    def __len__(self) -> int:
        return len(self._models.names)

    def __getitem__(self, client: int | str) -> nn.Module:
        if isinstance(client, int) and not 0 <= client < len(self):
            raise IndexError(f"client must be in 0..{len(self) - 1}, got {client}")
        return self._models.module(self._kind, client)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[i] for i in range(len(self)))


def _change_local_settings(local: LocalSGD, epochs: int | None, steps: int | None, lr: float | None) -> LocalSGD:
    """Return the settings with different epochs or steps per round, or with a constant step size."""
    if epochs is not None and steps is not None:
        raise ConfigError("set either epochs or steps, not both")
    fields = {name: getattr(local, name) for name in local.model_fields_set}
    if epochs is not None or steps is not None:
        fields = {k: v for k, v in fields.items() if k not in ("epochs", "steps")}
        fields |= {"epochs": epochs} if steps is None else {"steps": steps}
    if lr is not None:
        fields |= {"lr": lr, "schedule": "constant"}
    changed = LocalSGD(**fields)
    try:
        changed.check(1)
    except ConfigError as error:
        raise error.replace_fix("set at least one epoch or step in adapt, and a step size such as 0.01") from None
    return changed
