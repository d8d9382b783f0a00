"""One site's samples, represented as client i in a federation of n clients.

The server has the same federation, but without any samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data import DATA_PARTS, SOURCES, Dataset, Federation, Source, Split
from fedloom.data.groups import keep_group_columns
from fedloom.data.input_spec import InputSpec, comparable_facts
from fedloom.data.new_data import FIXED_TABLE_OPTIONS
from fedloom.data.partitions import Iid
from fedloom.data.pixels import is_from_bytes
from fedloom.data.sources.table.designs import DesignOptions
from fedloom.data.subjects.design import count_subjects
from fedloom.data.text import UNKNOWN_TOKEN, recode_tokens
from fedloom.errors import ConfigError, DataError, NoSamples, Refused
from fedloom.lab.experiment import Experiment, parse
from fedloom_sites.deploy.settings import Site

SPLIT_FIELDS = ("test", "validation", "max_train_per_client", "folds", "pool")
"""Fields of a partition that determine how a client's samples are split into parts."""
HASHED_SAMPLES = 4096
"""Number of samples that are hashed at a time."""


def site_federation(experiment: Experiment, site: Site) -> Federation:
    """Return a federation where only client ``site.client`` has samples, namely the site's samples.

    If a site's source contains no samples, its federation is empty: the site trains nothing, but receives the model.

    Raises:
        DataError: the data cannot be read, or a sample does not fit the experiment.
        ConfigError: the source contains an unknown option, or the partition does not define this client.
    """
    try:
        data = read_data(experiment, site)
    except NoSamples:
        return make_blank_federation(site.samples, torch.zeros(site.clients, len(DATA_PARTS), dtype=torch.long))
    seed, cut = experiment.head.seeds[0], experiment.partition
    if site.share == "partition":
        fed, client = cut(data, seed), site.client
        if fed.n != site.clients:
            raise ConfigError(
                f"{site.site}: the partition has {fed.n} clients, but the experiment has "
                f'{site.clients} sites. If the site has its own data, set share = "all"'
            )
    else:
        fields = {name: getattr(cut, name) for name in SPLIT_FIELDS if name in cut.model_fields_set}
        fed, client = Iid(clients=1, **fields)(data, seed), 0
    fed = replace(fed, data=_reorder_classes(fed.data, site.samples))
    check_samples(site, fed.data)
    return move_client_to_seat(fed, client, site.client, torch.ones(site.clients, dtype=torch.long))


def read_data(experiment: Experiment, site: Site) -> Dataset:
    """Return the site's samples from its source. Tables keep their raw columns.

    Raises:
        NoSamples: the source contains no samples.
        DataError: the data cannot be read, or contain fewer samples than agreed.
        ConfigError: the source contains an unknown option.
    """
    local = parse({**experiment.settings(), "data": options_of(experiment, site)}, f"{site.site}: the site file")
    try:
        data = keep_group_columns(local.source, experiment.kept_columns).read(site.data_dir)
    except ConfigError as error:  # the message may quote the first row of a file without a header
        raise DataError(str(error)) from error
    except NoSamples:
        raise
    except DataError as error:
        path = site.data.get("path")
        if path is not None and not Path(str(path)).exists():
            raise DataError(f"no data at {path}. Set path in [data] of site.toml to the site's data") from error
        raise
    check_patients(site, local.source, data)
    return data


def make_blank_federation(samples: InputSpec, sizes: Tensor) -> Federation:
    """Return a federation whose clients have known sizes and whose samples are all the same blank sample.

    Args:
        samples: description of a sample.
        sizes: number of training, validation and test samples of every client, ``[n, 3]``. A client without training
            samples is treated as if it had one.
    """
    places = (samples.positions,) if samples.each else ()
    target = torch.zeros(1, *places, dtype=torch.long) if samples.classed else torch.ones(1, samples.targets)
    x = torch.ones(1, *samples.shape, dtype=torch.int32) if samples.vocabulary else torch.zeros(1, *samples.shape)
    blank = Dataset(
        "blank", x, target, samples.task, samples.classes, vocabulary=samples.vocabulary,
        positions=samples.each and not samples.vocabulary,
    )  # fmt: skip
    counts = sizes.clamp(min=torch.tensor([1, 0, 0]))
    parts = {  # `expand` stores one number for all samples, because a site may claim any number of samples
        part: Split(torch.zeros(1, dtype=torch.long).expand(int(column.sum())), _compute_offsets(column))
        for part, column in zip(DATA_PARTS, counts.T, strict=True)
    }
    return Federation(blank, parts, tuple(str(i) for i in range(len(sizes))))


def check_samples(site: Site, data: Dataset) -> None:
    """Raise an error if data do not fit the experiment.

    Raises:
        DataError: the data do not match the experiment. The message describes both.
        ConfigError: the data contradict the experiment in a way that reveals no value of a sample, so that the server
            may see the message.
    """
    here = comparable_facts(data)
    for name, wanted in comparable_facts(site.samples).items():
        got = here[name]
        if got != wanted:
            raise (DataError if isinstance(got, list) and got and isinstance(got[0], str) else Refused)(
                f"{site.site}: {name} of the data is {_value_text(got)}, but the experiment has {_value_text(wanted)}. "
                "The columns, labels and options of the source must be the same at every site"
            )
    if site.samples.table is None and not site.samples.vocabulary:
        scaling, wanted = ((facts.mean, facts.std) for facts in (InputSpec.create(data), site.samples))
        if scaling != wanted:
            raise DataError(
                f"{site.site}: mean and std of [data] are {scaling}, but the experiment has {wanted}. "
                "Set the same values"
            )
        if not is_from_bytes(data) or not site.samples.pixels:  # byte values may include noise
            site.samples.samples(data.x, site.site, data.original_dtype)


def options_of(experiment: Experiment, site: Site) -> dict[str, Any]:
    """Return the site's table ``[data]``, including the location of its samples.

    The meaning of the columns comes from the agreement.

    If the site does not name columns for subjects, order and strata, the columns in the experiment are used, because a
    site cannot do without these columns.
    """
    designed = {key: value for key, value in experiment.source_options.items() if key in DesignOptions.option_names()}
    agreed = getattr(experiment.source, "agreement", None) or site.samples.agreement
    kind = SOURCES.get(site.data["source"])
    if agreed is None or (kind is not None and "agreement" not in kind.model_fields):
        return designed | site.data
    options = {key: value for key, value in site.data.items() if key not in FIXED_TABLE_OPTIONS or key == "missing"}
    return {**designed, **options, "agreement": agreed.model_dump(mode="json", exclude_none=True)}


def check_patients(site: Site, source: Source, data: Dataset) -> None:
    """Raise an error if a site has fewer rows than agreed, either in total or in a class.

    Raises:
        DataError: the site has too few rows. The message states the actual and the required number of rows.
    """
    agreement = getattr(source, "agreement", None)
    if agreement is not None:
        design, every = data.design, np.arange(len(data))
        rows = {} if data.labels is None else {c: data.labels.numpy() == k for k, c in enumerate(data.classes)}
        counts = {c: count_subjects(design, every[here]) for c, here in rows.items()}
        if few := agreement.shortcomings(counts, count_subjects(design, every)):
            raise DataError(f"{site.site}: {'; '.join(few)}")


def part_sizes(fed: Federation, client: int) -> list[int]:
    """Return a client's numbers of training, validation and test samples.

    All numbers are 0 at a site without samples.
    """
    if fed.data.name == "blank":
        return [0] * len(DATA_PARTS)
    return [int(fed.sizes(part)[client]) for part in DATA_PARTS]


def samples_digest(fed: Federation, client: int) -> str:
    """Return the SHA-256 of a client's samples, part by part, in training order."""
    digest = hashlib.sha256()
    for part in DATA_PARTS:
        index = [] if fed.data.name == "blank" else fed.indices(part, client).split(HASHED_SAMPLES)
        digest.update(f"{part} {sum(map(len, index))} {fed.data.shape} {fed.data.classes}\n".encode())
        for some in index:
            for values in (fed.fetch(some), fed.targets(some)):
                digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _reorder_classes(data: Dataset, samples: InputSpec) -> Dataset:
    """Return data with the experiment's token IDs, and with its class numbers if it has all classes of the data."""
    classes, vocabulary = samples.classes, samples.vocabulary
    if data.vocabulary and vocabulary[1:2] == (UNKNOWN_TOKEN,):
        data = replace(data, x=recode_tokens(data.x, data.vocabulary, vocabulary), vocabulary=vocabulary)
    if not data.classed or data.classes == classes or not set(data.classes) <= set(classes):
        return data
    place = torch.tensor([classes.index(name) for name in data.classes])
    return replace(data, y=torch.where(data.y < 0, data.y, place[data.y]), classes=classes)


def move_client_to_seat(fed: Federation, client: int, seat: int, train_sizes: Tensor) -> Federation:
    """Return a federation of n clients with client ``client`` renumbered to ``seat``.

    The samples of this client also replace the samples of all other clients.

    Args:
        fed: federation.
        client: number of the client whose samples are used.
        seat: new number of the client.
        train_sizes: number of training samples of the other clients, ``[n]``, about which nothing else is known.
    """
    parts, filler = dict[str, Split](), fed.indices("train", client)[:1]
    for part in DATA_PARTS:
        rows = fed.indices(part, client)
        sizes = train_sizes.clone() if part == "train" else torch.zeros_like(train_sizes)
        sizes[seat] = len(rows)
        index = [rows if i == seat else filler.repeat(size) for i, size in enumerate(sizes.tolist())]
        parts[part] = Split(torch.cat(index), _compute_offsets(sizes))
    names = tuple(fed.names[client] if i == seat else str(i) for i in range(len(train_sizes)))
    return replace(fed, parts=parts, names=names, test=None, groups=None, partition={})


def _compute_offsets(sizes: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])


def _value_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
