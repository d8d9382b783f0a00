"""Base class of the oracles for neural networks: samples, dropout masks, evaluation and activations."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedloom.data.groups import two_groups
from fedloom.errors import attribute_error
from fedloom.hints import unknown_name_error
from fedloom.local.batches import PASS_STREAM
from fedloom.local.oracles.allocator import keep_memory
from fedloom.local.oracles.base import Oracle, Reduce
from fedloom.local.oracles.forward import (
    FORWARD_SAMPLES,
    RepresentationSpot,
    dropout_shapes,
    find_representation,
    memory_format,
    record_layer_calls,
    repeat_single,
    samples_per_evaluation,
    set_training,
)
from fedloom.local.oracles.precision import use_bfloat16
from fedloom.local.oracles.probes import (
    draws_globally,
    find_written_parameters,
    hides_randomness,
    mixes_samples,
    reached_mask,
    returns_probabilities,
    spread_samples,
    unregistered_modules,
)
from fedloom.local.oracles.samples import GROWING_FACTORS, Samples, batch_loss, probe_task
from fedloom.models import Augment
from fedloom.models.dropout import Dropout
from fedloom.models.parts import BATCH_STATISTICS
from fedloom.rows.layout import Layout, trainable
from fedloom.seeds import as_global, generator
from fedloom.tasks import ChosenTask

if TYPE_CHECKING:
    from fedloom.data.federation import Federation
    from fedloom.local.batches import Batch
    from fedloom.tasks import Task

MAX_BOUNDED_GROWTH = 10.0
"""A model's outputs are bounded, as with sigmoid or tanh, if outputs above 1 grow with the parameters by at most this
factor."""
SIGN_TRIALS = 16
"""Number of draws of random signs. A network that can have positive outputs almost surely has some in these draws."""


class Network(Oracle):
    """Local problems of a network on a federation's training sets. Subclasses compute the gradients.

    If ``low`` is True, gradients of steps are computed in bfloat16 (see `fedloom.local.oracles.precision`).

    Args:
        module: the network. It is copied and never modified.
        task: task that defines the loss.
        fed: clients and their data. The oracle uses the data's dtype and device.
        augment: random changes applied to samples only when the gradient of a step is computed.

    Raises:
        LayoutError: no parameter of the network is trainable.
        ConfigError: a user-defined loss or metric of the task does not work.
    """

    low = False
    unseeded: Sequence[str] = ()
    """Names of the user's loss and metrics whose values differ between identical calls with equal global generators."""
    moved: Sequence[str] = ()
    """Names of the module's buffers and attributes that training changes."""

    def __init__(self, module: nn.Module, task: Task, fed: Federation, augment: Augment | None = None) -> None:
        self.task, self.fed, self.augment, self._module = task, fed, augment, module
        self.whole = fed.data.task == "survival"
        self.layout = Layout.create(module)
        self.dtype, self.device = fed.dtype, fed.device
        self.module = copy.deepcopy(module).to(device=fed.device, dtype=fed.dtype)
        self.parameters = list(trainable(self.module).values())
        self.dropouts = {name: m for name, m in self.module.named_modules() if isinstance(m, Dropout) and m.p > 0}
        self.normalisers = [m for m in self.module.modules() if isinstance(m, BATCH_STATISTICS)]
        self._statistics_of: tuple[Tensor, Tensor] | None = None
        self._train_sizes = fed.sizes("train").cpu()
        self.class_weights: Tensor | None = None
        self.labels_each: Tensor | None = None
        if fed.data.each:
            self.labels_each = (fed.class_counts("train").sum(1) / fed.sizes("train")).to(fed.device, fed.dtype)
        self._features = dropout_shapes(self.module, self.dropouts, self._sample()) if self.dropouts else {}
        self.memory_format = memory_format(self.module, self._sample())
        if isinstance(task, ChosenTask):
            several = fed.data.task == "multilabel"
            weights = task.class_weights(fed.label_counts("train") if several else fed.class_counts("train"))
            self.class_weights = None if weights is None else weights.to(self.device, self.dtype)
            index = spread_samples(fed)
            if fed.data.name != "blank":  # the server of a deployment has no samples
                with attribute_error("model", module, "a trial on a few samples"):
                    row, x = self.layout.vector(self.module), fed.fetch(index)
                    grown = GROWING_FACTORS[0] * row if task.objective.loss is not None else row
                    large, outputs = self.run(grown, x).abs().amax(), self.run(row, x)
                    negative = task.objective.loss is not None and bool((outputs <= 0).all())
                    negative = negative and self._stays_negative(row, x)
                    self._install_views(self._views_to_run(row))  # the run reads the initial model from the module
                bounded = bool(large <= MAX_BOUNDED_GROWTH * outputs.abs().amax().clamp(min=1))
                self.unseeded = probe_task(task, outputs, fed.targets(index), bounded, negative)
        keep_memory()

    def _stays_negative(self, row: Tensor, x: Tensor) -> bool:
        """Return True if no output is positive when the parameters ``row`` have random signs.

        Outputs of a log-softmax and negative distances are never positive, whatever the parameters.
        """
        draws = generator(0, purpose="probe")
        for _ in range(SIGN_TRIALS):  # one draw at a time to save memory
            signs = torch.randint(2, row.shape, generator=draws, dtype=torch.int8) * 2 - 1
            if bool((self.run(row * signs.to(row.device), x) > 0).any()):
                return False
        return True

    def samples(self, batch: Batch, *, step: bool = False) -> Samples:
        """Return a batch's samples, augmented if they are used for the gradient of a step."""
        ids = batch.ids.to(self.device)
        weights, each = (None if of is None else of[ids] for of in (self.class_weights, self.labels_each))
        changed = step and batch.draw.stream != PASS_STREAM
        return Samples(self.fed, batch, self.dtype, weights, each, changed=changed, augment=self.augment)

    def uses_low_precision(self, batch: Batch) -> bool:
        """Return True if a batch gradient is computed in bfloat16."""
        return self.low and batch.draw.stream != PASS_STREAM

    def lower_precision(self, batch: Batch) -> AbstractContextManager[object]:
        """Within the block, set the precision of batch gradients."""
        return use_bfloat16(self.device, self.uses_low_precision(batch))

    def sizes(self, ids: Tensor) -> Tensor:
        """Return each client's number of training samples."""
        return self._train_sizes[ids]

    def locate(self, ids: Tensor, position: Tensor) -> Tensor:
        """Return the indices of samples in the data set, ``[..., m, b]``.

        One of the client's samples replaces padding.
        """
        index, offsets = self.fed.parts["train"]
        start: Tensor = offsets[ids.to(index.device)][:, None]
        return index[start + position.to(index.device).clamp(min=0)]

    def batch_loss(self, w: Tensor, batch: Batch) -> Tensor:
        """Return the weighted sum of the sample losses, ``[m, 1]``.

        All modules are in evaluation mode. Batch normalization uses the statistics of the client's training set.
        """
        data = self.samples(batch)
        loss = torch.zeros(len(w), 1, dtype=self.dtype, device=self.device)
        for i, count in enumerate(data.counts):
            if count:
                self.set_statistics(w[i], batch.ids[i : i + 1])
                loss[i] = batch_loss(self.task, self.run(w[i], data.x[i, :count]), data, i)
        return loss

    def activations(
        self, w: Tensor, ids: Tensor, layer: str, reduce: Reduce | None, batch: Batch | None = None
    ) -> Tensor:
        """Return the mean ``[m, a]`` of reduced outputs of ``layer``, over ``batch`` or each client's training set.

        Raises:
            ConfigError: the model has no such layer.
        """
        means: list[Tensor] = []
        for k, (row, i) in enumerate(zip(w, ids.tolist(), strict=True)):
            index = self.fed.indices("train", i)
            index = index if batch is None else index[batch.position[k, : int(batch.count[k])]]
            self.set_statistics(row, ids[k : k + 1])
            features = self.representations(row, index, layer)
            means.append((features if reduce is None else reduce(features)).mean(0))
        return torch.stack(means)

    def representations(self, row: Tensor, index: Tensor, layer: str = "penultimate") -> Tensor:
        """Return the flattened outputs ``[b, a]`` of a layer for the samples ``index`` under the model ``row [d]``.

        For sequences with a label per position, the result has one row per labeled position.

        Raises:
            ConfigError: the model has no such layer.
        """
        spot, modules = self.spot if layer == "penultimate" else RepresentationSpot(layer), self._modules
        if spot.name != "logits" and spot.name not in modules:
            raise unknown_name_error("layer", layer, ["penultimate", "logits", *modules])
        pieces = index.split(self._together)  # computed first, because the hook must not see its forward pass
        with record_layer_calls(modules.get(spot.name, self.module), entering=spot.entering) as outputs:
            for piece in pieces:
                self.run(row, self.fed.fetch(piece))
        features = torch.cat(outputs)
        if self.labels_each is not None:
            return features.flatten(0, 1).flatten(1)[self.fed.targets(index) >= 0]
        return features.flatten(1)

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        """Layers of the network, keyed by name."""
        return {name: m for name, m in self.module.named_modules() if name}

    @cached_property
    def spot(self) -> RepresentationSpot:
        """Location of the representation."""
        return find_representation(self._module, self._sample())

    def accuracy(self, w: Tensor, ids: Tensor) -> Tensor:
        """Return the fraction of each client's training samples that are predicted correctly, ``[m, 1]``.

        Raises:
            ConfigError: the task has no classes.
        """
        if not self.fed.data.classed:
            return super().accuracy(w, ids)
        pairs = (self._predict_training_samples(row, i) for row, i in zip(w, ids, strict=True))
        return torch.stack([(guess == y)[y >= 0].to(self.dtype).mean() for guess, y in pairs])[:, None]

    def _predict_training_samples(self, row: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predicted classes and the targets of a client's training samples."""
        self.set_statistics(row, client[None])
        index = self.fed.indices("train", int(client))
        return torch.cat([self.task.predict(out) for out in self.outputs(row, index)]), self.fed.targets(index)

    def group_counts(self, w: Tensor, ids: Tensor, group: str) -> Tensor:
        """Count each client's training samples in two groups, ``[m, 8]`` (see `Work.group_counts`).

        Raises:
            ConfigError: the task is not binary, or the groups do not exist.
        """
        if self.fed.data.task != "binary":
            return super().group_counts(w, ids, group)
        members = two_groups(self.fed.data, group)
        counts = []
        for row, i in zip(w, ids, strict=True):
            index = self.fed.indices("train", int(i))
            guess, y = self._predict_training_samples(row, i)
            kinds = torch.stack([torch.ones_like(y, dtype=torch.bool), guess == 1, y == 1, (guess == 1) & (y == 1)])
            counts.append(torch.cat([(kinds & here[index.cpu()].to(kinds.device)).sum(1) for here in members]))
        return torch.stack(counts).to(self.dtype)

    def class_counts(self, ids: Tensor) -> Tensor:
        """Return each client's number of training samples per class, ``[m, c]``.

        Raises:
            ConfigError: the task has no classes.
        """
        if not self.fed.data.classed:
            return super().class_counts(ids)
        return self._class_counts[ids.to(self._class_counts.device)].to(self.device, self.dtype)

    @cached_property
    def _class_counts(self) -> Tensor:
        return self.fed.class_counts("train")

    def draw_masks(self, batch: Batch, row: int, count: int) -> dict[str, Tensor]:
        """Return a client's dropout masks, keyed by layer name."""
        return {name: self._mask(name, batch, row, count) for name in self.dropouts}

    # ------------------------------------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def run(self, row: Tensor, x: Tensor) -> Tensor:
        """Compute outputs ``[b, k]`` (or ``[b L, k]`` for L labels each) of the model ``row [d]`` in evaluation mode.

        A module that draws random numbers in evaluation mode draws the same numbers in every call.
        """
        self._install_views(self._views_to_run(row))
        if self.normalisers:  # set_statistics changes the mode of these layers
            self.module.eval()
        set_training(self.module, False)
        with self._seed_random_layers():
            return self.module(self.set_memory_format(x)).flatten(0, -2)  # type: ignore[no-any-return]

    def _seed_random_layers(self) -> AbstractContextManager[object]:
        """Seed the random generators inside the block if the module draws random numbers in evaluation mode."""
        return as_global(generator(0, purpose="evaluation"), self.device) if self.draws_evaluated else nullcontext()

    def outputs(self, row: Tensor, index: Tensor) -> Iterator[Tensor]:
        """Yield outputs of the model ``row [d]`` for the samples ``index``, part by part."""
        for piece in index.split(self._together):
            yield self.run(row, self.fed.fetch(piece))

    def outputs_of(self, rows: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
        """Return outputs ``[N, k]`` of models ``rows [m, d]``, each for its own ``sizes [m]`` samples in ``index [N]``.

        Each model's outputs do not depend on the other models.
        """
        pieces = index.split(sizes.tolist())
        blocks = [
            out for row, piece in zip(rows, pieces, strict=True) if len(piece) for out in self.outputs(row, piece)
        ]
        return torch.cat(blocks) if blocks else rows.new_empty(0, self.task.outputs)

    @cached_property
    def _together(self) -> int:
        return samples_per_evaluation(self.module, self._sample())

    @torch.no_grad()
    def set_statistics(self, row: Tensor, ids: Tensor) -> None:
        """Compute normalization statistics of the model ``row`` from the training data of ``ids``, weighted by size.

        This has no effect without batch statistics. The oracle's own copy of the model contains the statistics until
        they are set again.
        """
        if not self.normalisers or self._has_statistics_of(row, ids):
            return
        self._statistics_of = None
        self._install_views(self._views_to_run(row))
        self.module.eval()
        for normaliser in self.normalisers:
            normaliser.train()
            normaliser.momentum = 1.0
        pieces = [piece for i in ids.tolist() for piece in self.fed.indices("train", i).split(FORWARD_SAMPLES)]
        samples = sum(len(piece) for piece in pieces)
        total = [torch.zeros_like(s) for s in self._statistics()]
        for piece in pieces:
            with self._seed_random_layers():
                self.module(repeat_single(self.set_memory_format(self.fed.fetch(piece))))
            for t, s in zip(total, self._statistics(), strict=True):
                t.add_(s, alpha=len(piece) / samples)
        for target, value in zip(self._statistics(), total, strict=True):
            target.copy_(value)
        self._statistics_of = row.clone(), ids.clone()

    def _has_statistics_of(self, row: Tensor, ids: Tensor) -> bool:
        """Return True if the statistics are already set, for example if a client has several parts."""
        latest = self._statistics_of
        return latest is not None and torch.equal(latest[0], row) and torch.equal(latest[1].cpu(), ids.cpu())

    def _statistics(self) -> list[Tensor]:
        return [s for n in self.normalisers for s in (n.running_mean, n.running_var) if s is not None]

    # ---------------------------------------------------------------------------------------------------- inside

    @cached_property
    def reached(self) -> Tensor | None:
        """Mask ``[d]`` of the parameters that affect the loss. None if all parameters affect it."""
        return reached_mask(self._module, self.fed, self.layout)

    @cached_property
    def reached_with_terms(self) -> Tensor | None:
        """Mask ``[d]`` of the parameters that affect the loss of a method with terms on the representation."""
        return None if self.reached is None else reached_mask(self._module, self.fed, self.layout, self.spot)

    @cached_property
    def draws_evaluated(self) -> bool:
        """True if the module draws random numbers in evaluation mode, for example because dropout stays active."""
        return draws_globally(self._module, self.fed, trains=False)

    @cached_property
    def hides_randomness(self) -> bool:
        """True if outputs depend on anything except the parameters, the samples and the global random generators."""
        return not self.moved and hides_randomness(self._module, self.fed)

    @cached_property
    def mixes_samples(self) -> bool:
        """True if the outputs for a sample depend on the other samples of a batch."""
        return mixes_samples(self._module, self.fed)

    @cached_property
    def returns_probabilities(self) -> bool:
        """True if the outputs for a sample are nonnegative and sum to 1."""
        return returns_probabilities(self._module, self.fed)

    @property
    def unregistered(self) -> Sequence[str]:
        """Names of layers and parameters that no list of parameters contains."""
        return unregistered_modules(self._module)

    @cached_property
    def overwritten(self) -> Sequence[str]:
        """Names of the parameters that a forward pass changes."""
        return find_written_parameters(self._module, self.fed)

    def views(self, row: Tensor) -> list[Tensor]:
        """Return the parameters as views of ``row [d]``, in the order of the module."""
        return list(self.layout.tree(row).values())

    def _views_to_run(self, row: Tensor) -> list[Tensor]:
        """Return the parameters for a pass that must not change ``row``."""
        return self.views(row.clone() if self.overwritten else row)

    def _install_views(self, views: list[Tensor]) -> None:
        """Set these parameters in the module."""
        for p, value in zip(self.parameters, views, strict=True):
            p.data = value

    def set_memory_format(self, x: Tensor) -> Tensor:
        """Return samples ``[b, *shape]`` in the module's fastest memory format.

        The values remain the same.
        """
        return x if self.memory_format is torch.contiguous_format else x.clone(memory_format=self.memory_format)

    def _sample(self) -> Tensor:
        return self.fed.fetch(self.fed.parts["train"].index[:1])

    def _mask(self, name: str, batch: Batch, row: int, count: int) -> Tensor:
        """Return a dropout layer's mask ``[count, *features]``, drawn from the client's own generator."""
        g = batch.draw.generator(row, name)
        return self.dropouts[name].draw((count, *self._features[name]), g).to(self.device)

    def _masks(self, batch: Batch, counts: list[int]) -> dict[str, Tensor]:
        """Return the masks of all dropout layers ``{name: [m, b, *features]}``, which are 0 for padding."""
        masks: dict[str, Tensor] = {}
        for name, shape in self._features.items():
            lead = batch.position.shape
            masks[name] = mask = torch.zeros(*lead, *shape, dtype=self.dtype, device=self.device)
            for row, count in enumerate(counts):
                mask[row, :count] = self._mask(name, batch, row, count)
        return masks


def scale_(target: Tensor, beta: float | Tensor) -> Tensor:
    """Multiply ``target`` in place by ``beta``, which is a scalar or has one number per client.

    If it is the scalar 0, the target becomes zero even if its old values are not finite.
    """
    if isinstance(beta, Tensor):
        return target.mul_(beta.view(-1, *[1] * (target.dim() - 1)))
    if beta == 0:
        return target.zero_()
    return target if beta == 1 else target.mul_(beta)
