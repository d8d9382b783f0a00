"""Clients that are passed with their samples, as a training and a test set or as a single set to split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.data.dataset import Dataset
from fedloom.data.partitions import Natural
from fedloom.data.samples import find_pair
from fedloom.data.sides import (
    are_sample_sets,
    batches_error,
    check_joinable,
    join_roles,
    merge_class_names,
    read_sample_set,
)
from fedloom.data.sources.rereading import Rereading
from fedloom.data.sources.table.frames import is_frame
from fedloom.errors import ConfigError, DataError
from fedloom.values import has_type

if TYPE_CHECKING:
    from fedloom.data.federation import Federation

CLIENTS_EXAMPLE = (
    "a list [((x_train, y_train), (x_test, y_test)), ...], or [(x, y), ...], which fedloom splits into parts"
)

"""Examples of valid values of the argument `clients`, which are shown in messages."""


def as_federation(
    clients: Sequence[object] | Mapping[str, object],
    *,
    test: float = 0.2,
    validation: float = 0.1,
    seed: int = 0,
    **options: object,
) -> Federation:
    """Return a federation of clients that are passed with their samples.

    Args:
        clients: list of clients, or a mapping from names to clients. A client is a tuple (training set, test set), in
            which each set is a tuple (x, y) or any other argument of `Dataset.create`. A client may also be a single
            set, from which a test set is drawn.
        test: fraction of each client's samples held out for testing, unless the client has a test set.
        validation: fraction of the samples that are held out for validation. It is a fraction of the client's training
            set, or of all its samples if the client has no test set.
        seed: seed of the splits.
        options: options of the data set, which are ``task``, ``name``, ``classes``, ``mean``, ``std``,
            ``channels_last`` and ``vocabulary``. If clients are dictionaries with ``x`` and ``y``, these may also
            contain ``subject``, ``order`` and ``strata``.

    Raises:
        ConfigError: the argument is not a list or mapping of clients, or some clients have a test set and others do
            not.
        DataError: the samples of a client cannot be read, or their shape differs from the shape of the first client's
            samples.
    """
    name = str(options.pop("name", "clients"))
    if isinstance(clients, tuple) and len(clients) == 2:
        raise ConfigError(
            f"{name}: a tuple of two elements is either one data set (x, y), or the training and test "
            f"set of one client. For several clients, pass {CLIENTS_EXAMPLE}"
        )
    if not has_type(clients, Iterable) or has_type(clients, str, bytes):
        raise ConfigError(
            f"{name}: clients must be a list, or a table of clients by name, got {clients!r:.80}. "
            f"Pass {CLIENTS_EXAMPLE}"
        )
    if getattr(clients, "ndim", 1) == 0:
        raise ConfigError(f"{name}: clients must be a list, or a table of clients by name, got {clients!r:.80}")
    by_name = clients if isinstance(clients, Mapping) else dict(enumerate(clients))
    named = {str(who): client for who, client in by_name.items()}
    if len(named) < len(by_name):
        raise ConfigError(f"{name}: two clients have the same name as text, such as 1 and '1'. Rename one of them")
    if not named:
        raise ConfigError(f"{name} contains no clients. Pass {CLIENTS_EXAMPLE}")
    if all(hasattr(client, "shape") and not is_frame(client) for client in named.values()):
        raise ConfigError(
            f"{name}: a list contains clients, but these are arrays without targets. Pass a tuple (x, "
            "y) for each client. To split one data set among clients, use a partition, such as "
            "fl.partitions.iid(clients=10)((x, y))"
        )
    split = {who: _is_split(client, f"{name}: client {who}") for who, client in named.items()}
    if len(set(split.values())) > 1:
        without = [who for who, has_samples in split.items() if not has_samples]
        raise ConfigError(
            f"{name}: clients {without[:8]} have no test set, but other clients have one. Pass a test "
            "set for all clients, or for none"
        )
    both = split[next(iter(named))]
    for who, client in named.items():
        for side in _split_sample_sets(client, split[who]):
            if isinstance(side, list) and are_sample_sets(side):
                raise batches_error(f"{name}: client {who}", side)
    last: Any = options.pop("channels_last", None)
    places = {who: f"{name}: client {who}" for who in named}
    sides = [[read_sample_set(side, None, None, None, places[who]).placed(last, places[who])
              for side in _split_sample_sets(client, both)]
             for who, client in named.items()]  # fmt: skip
    for who, parts in zip(named, sides, strict=True):
        for part in parts:
            if part.x.shape[1:] != sides[0][0].x.shape[1:]:
                raise DataError(
                    f"{name}: client {who} has samples of shape {[*part.x.shape[1:]]}, but the first client has "
                    f"samples of shape {[*sides[0][0].x.shape[1:]]}. All samples must have the same shape"
                )
    training, *tested = [{f"client {who}": parts[k] for who, parts in zip(named, sides, strict=True)}
                      for k in range(len(sides[0]))]  # fmt: skip
    tests = {f"{who}, test set": side for test_sides in tested for who, side in test_sides.items()}
    check_joinable(name, {**training, **tests}, "vocabulary" in options)
    joined = [[np.concatenate([getattr(parts[k], field) for parts in sides]) for field in ("x", "y")]
              for k in range(len(sides[0]))]  # fmt: skip
    width = len(str(len(named)))
    owners = [f"{place:0{width}}" for k in range(len(sides[0]))
              for place, parts in enumerate(sides) for _ in range(len(parts[k].x))]  # fmt: skip
    classes = merge_class_names(side for parts in sides for side in parts)
    in_order = [_split_sample_sets(client, both)[k] for k in range(len(sides[0])) for client in named.values()]
    options = {**join_roles(in_order, name), **options}
    options = {"clients": np.array(owners), "name": name, "classes": classes, "channels_last": False, **options}
    data = Dataset.create(tuple(joined[0]), **options, **({"test": tuple(joined[1])} if both else {}))
    every = (parts[k] for k in range(len(sides[0])) for parts in sides)
    data = Rereading.attach(data, [(len(part.x), part.reader) for part in every])
    cut = Natural(test=0.0 if both else test, validation=validation, test_from="clients" if both else "own")
    fed = cut(data, seed)
    everyone = list(named)
    notes = list(dict.fromkeys(note for parts in sides for part in parts for note in part.notes))
    if not both and (empty := [who for who, parts in zip(named, sides, strict=True) if not len(parts[0].x)]):
        notes.append(f"{len(empty)} of {len(named)} clients have no samples and are omitted: {', '.join(empty[:8])}")
    return replace(
        fed,
        names=tuple(everyone[int(place)] for place in fed.names),
        notes=(*fed.notes, *(f"{name}: {note}" for note in notes)),
    )


def _is_split(client: Any, place: str) -> bool:
    """Return True if a client consists of a training and a test set, or False if it is a single set.

    Raises:
        ConfigError: a client is given as a list of two sets, although a list must contain samples.
    """
    if isinstance(client, Mapping):
        return "train" in client
    pair = isinstance(client, tuple | list) and len(client) == 2
    is_split = pair and all(isinstance(side, Mapping) or not _is_values(side) for side in client)
    if is_split and isinstance(client, list) and not _are_samples(client):
        raise ConfigError(
            f"{place} is a list of two sets, but a list must contain samples. Pass the tuple "
            "(training set, test set), or {'train': ..., 'test': ...}"
        )
    return is_split and isinstance(client, tuple)


def _are_samples(sets: Sequence[Any]) -> bool:
    """Return True if each object is a sample whose target is a single number or text."""
    pairs = [find_pair(one) or one for one in sets]
    return all(isinstance(pair, tuple) and len(pair) == 2 and np.ndim(pair[1]) == 0 for pair in pairs)


def _is_values(side: object) -> bool:
    """Return True if the object contains only features or only targets, or False if it is a set that contains both."""
    if hasattr(side, "shape"):
        return True
    return isinstance(side, tuple | list) and not (len(side) == 2 and all(hasattr(part, "__len__") for part in side))


def _split_sample_sets(client: Any, split: bool) -> Sequence[Any]:
    if not split:
        return [client]
    return [client["train"], client["test"]] if isinstance(client, Mapping) else [*client]
