"""Networks from papers, keyed by name, with the numbers of parameters given in the papers or their code."""

from __future__ import annotations

import json
from copy import copy
from typing import Any, cast

from pydantic import create_model

from fedloom.models.nets import CNN, MLP
from fedloom.models.resnet import ResNet18
from fedloom.models.sequences import LSTM
from fedloom.models.spec import ModelSpec

PAPER_NETWORKS: dict[str, ModelSpec] = {
    # Zhu et al. (FLAME), code
    # 109,386 on 1x28x28, 10 classes; the paper's Table II has 7,850, which is softmax
    "flame-mlp": MLP(hidden=(128, 64)),
    "flame-cifar10": CNN(channels=(16, 32), kernel=3, padding=1, hidden=(128,)),  # 268,650 on 3x32x32, 10 classes
    "flame-mmnist": CNN(channels=(32, 16), kernel=3, dropout=0.2, hidden=(64,)),  # 206,678 on 3x64x64, 6 classes
    "flame-femnist": CNN(channels=(32, 64), kernel=(7, 3), padding=(3, 1), hidden=()),  # 214,590 on 1x28x28, 62 classes
    # Equitable-FL
    "equitable-mnist": MLP(hidden=(200, 200)),  # 199,210 on 1x28x28, 10 classes
    # 62,006 on 3x32x32, 10 classes; widths not in the paper
    "lenet": CNN(channels=(6, 16), kernel=5, hidden=(120, 84)),
    "equitable-femnist": CNN(channels=(32, 64), kernel=5, dropout=0.2, hidden=(512,)),  # 608,702 on 1x28x28, 62 classes
    "equitable-cifar100": CNN(  # five convolutions, three poolings, 512; the other widths are not in the paper
        channels=(32, 64, 128, 128, 128), kernel=3, padding=1, pool=(True, True, False, False, True), hidden=(512,)
    ),
    # FIAELT, Table 3
    "fiaelt-synthetic": MLP(hidden=(32,)),  # 2,282 on 60 features, 10 classes
    "fiaelt-femnist": MLP(hidden=(128,)),  # 103,834 on 1x28x28, 26 classes
    # FedSLR, Table 2
    "fedslr-resnet18": ResNet18(),  # 11,173,952 on 3x32x32, 10 classes
    # LEAF, Shakespeare: 80 characters, padding and unknown; torch's layers have two biases each
    "leaf-shakespeare": LSTM(embedding=8, hidden=256, layers=2),  # 819,936
}
"""The entries are values: `fedloom.models.make_spec` returns an entry after changing some fields."""


def preset_class(name: str) -> type[ModelSpec]:
    """Return a class of specifications with the default values of a network in `PAPER_NETWORKS`.

    The reference page, the JSON schema and ``fedloom list`` read this class, so that they show the values that a run
    uses. Its docstring names the kind of the model, and each default value that differs from the default value of the
    kind.

    Raises:
        KeyError: there is no network with this name.
    """
    spec = PAPER_NETWORKS[name]
    kind = type(spec)
    changed = {key: value for key, value in spec if value != kind.model_fields[key].get_default()}
    fields: dict[str, Any] = {}
    for key, value in changed.items():
        field = copy(kind.model_fields[key])
        field.default = value
        fields[key] = (field.annotation, field)
    options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in changed.items())
    preset = create_model(
        name,
        __base__=kind,
        __module__=__name__,
        __doc__=f"``{kind.__name__.lower()}`` with {options or 'its defaults'}.",
        **fields,
    )
    return cast("type[ModelSpec]", preset)
