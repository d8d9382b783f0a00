"""Attacks on samples: attackers poison training data, and test samples measure the effect of a backdoor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedloom.data.federation import Federation, Split
from fedloom.errors import ConfigError, attribute_error
from fedloom.rows.attacks import Backdoor, Poison
from fedloom.seeds import generator

TRIGGERED_PARTS = {"validation": "triggered validation", "test": "triggered test"}
"""Names of additional data parts with copies of another part's samples that contain a backdoor's trigger."""


def poison_training_data(fed: Federation, attack: Poison | Backdoor, attackers: Tensor, seed: int) -> Federation:
    """Return the federation with the attackers' poisoned training data: changed labels, or samples with a trigger.

    Evaluation data are unchanged.
    """
    if isinstance(attack, Backdoor):
        x, y, label = fed.data.x.clone(), fed.data.y.clone(), attack.label(fed.data.classes)
        for i in attackers.tolist():
            index = fed.indices("train", i)
            drawn = torch.randperm(len(index), generator=generator(seed, 0, i, "poison"))
            where = index[drawn[: round(attack.share * len(index))].sort().values.to(index.device)]
            x[where], y[where] = _stamp_triggers(fed, attack, where, torch.full_like(where, i)), label
        return replace(fed, data=replace(fed.data, x=x, y=y))
    y, classes = fed.data.y.clone(), len(fed.data.classes)
    for i in attackers.tolist():
        index = fed.indices("train", i)
        labels = y[index].cpu()
        with attribute_error("attack", attack, "poison"):
            wrong: Any = attack.poison(labels.clamp(min=0), classes, generator(seed, 0, i, "poison"))
            if not isinstance(wrong, Tensor) or wrong.dtype != torch.int64 or wrong.shape != labels.shape:
                got = f"{wrong.dtype} {[*wrong.shape]}" if hasattr(wrong, "dtype") else type(wrong).__name__
                raise ValueError(
                    f"`poison` must return a tensor of shape {[*labels.shape]} and dtype torch.int64, got {got}"
                )
            if len(wrong) and (int(wrong.min()) < 0 or int(wrong.max()) >= classes):
                raise ValueError(
                    f"labels must be from 0 to {classes - 1}, got {int(wrong.min())} to {int(wrong.max())}"
                )
        y[index] = torch.where(labels < 0, labels, wrong).to(y.device)
    return replace(fed, data=replace(fed.data, y=y))


def add_triggers(fed: Federation, attack: Backdoor) -> Federation:
    """Return the federation with the additional parts in `TRIGGERED_PARTS`.

    These parts contain no samples of the target class.

    Raises:
        ConfigError: the task has no classes, or the data lack the target class or the columns of the trigger.
    """
    data, parts = fed.data, dict(fed.parts)
    if data.labels is None or data.vocabulary:
        raise ConfigError(
            f"a backdoor requires numeric samples with one class each, but {data.name} has no such samples",
            rule="attack-needs-classes",
            fix="omit {attack}",
        )
    label, copied = attack.label(data.classes), [torch.arange(len(data), device=data.x.device)]
    for part, name in TRIGGERED_PARTS.items():
        index, owner, first = fed.parts[part].index, fed.owner(part), len(data)
        others = data.y[index] != label
        index, owner = index[others], owner[others]
        ends = torch.bincount(owner, minlength=fed.n).cumsum(0)
        places = torch.arange(first, first + len(index), device=index.device)
        parts[name] = Split(places, torch.cat([ends.new_zeros(1), ends]))
        data = data.append_samples(index, _stamp_triggers(fed, attack, index, owner), torch.full_like(index, label))
        copied.append(index)
    return replace(fed, data=data, parts=parts, noise=None if fed.noise is None else fed.noise[torch.cat(copied)])


def _stamp_triggers(fed: Federation, attack: Backdoor, index: Tensor, owner: Tensor) -> Tensor:
    """Return stored copies of the samples `index` ``[k]`` of the clients `owner` ``[k]``, with the trigger added."""
    data, fitted = fed.data, fed.data.fitted
    with attribute_error("attack", attack, "stamp"):
        if fitted is not None:
            names = {column.name: column.names for column in fitted.table.columns}
            raw = attack.stamp(fitted.raw[index.cpu()], names)
            stamped = torch.empty(len(raw), *data.shape)
            for i in owner.cpu().unique().tolist():
                rows = owner.cpu() == i
                stamped[rows] = fitted.table.encoder(fitted.values[i])(raw[rows])
            return stamped.to(data.x)
        names = {str(place): () for place in range(data.shape[0])} if len(data.shape) == 1 else {}
        if data.x.dtype == torch.uint8:
            return (attack.stamp(data.x[index] / 255, names) * 255).round().clamp(0, 255).to(torch.uint8)
        return attack.stamp(data.x[index], names).to(data.x)
