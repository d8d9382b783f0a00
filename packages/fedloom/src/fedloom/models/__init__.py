"""Models as values: ``MODELS`` by kind, ``PAPERS`` by name, the named parts of a built module, and augmentation."""

from __future__ import annotations

from fedloom.hints import unknown
from fedloom.lazy import lister
from fedloom.models.adapters import Adapters, adapted, merged
from fedloom.models.augment import Augment
from fedloom.models.dropout import Dropout
from fedloom.models.factors import Factorised, factorise, thin
from fedloom.models.guided import Guided
from fedloom.models.hub import Hub
from fedloom.models.imported import Import
from fedloom.models.memory import WithMemory
from fedloom.models.mixture import MIXING, Mixture, log_probabilities
from fedloom.models.nets import CNN, MLP, Softmax
from fedloom.models.papers import PAPERS, preset_class
from fedloom.models.parts import head, penultimate
from fedloom.models.resnet import ResNet18
from fedloom.models.sequences import LSTM, Transformer
from fedloom.models.spec import ModelSpec

MODELS: dict[str, type[ModelSpec]] = {
    "softmax": Softmax,
    "mlp": MLP,
    "cnn": CNN,
    "resnet18": ResNet18,
    "lstm": LSTM,
    "transformer": Transformer,
    "hub": Hub,
    "import": Import,
}
"""Model specifications by the ``kind`` of an experiment's ``[model]`` table."""
KINDS: dict[str, type[ModelSpec]] = {**MODELS, **{name: preset_class(name) for name in PAPERS}}
"""The class of every kind of `MODELS` and of every network of `PAPERS`, with the defaults that a run has."""


def spec_of(kind: str, **options: object) -> ModelSpec:
    """The specification of a kind of `MODELS` or a name of `PAPERS`, with some of its fields given.

    Raises:
        ConfigError: the kind or a field is unknown, or a value out of range.

    >>> spec_of("mlp", hidden=[64]).hidden
    (64,)
    >>> spec_of("lenet", padding=2).hidden
    (120, 84)
    """
    if kind in MODELS:
        return MODELS[kind](**options)
    if kind in PAPERS:
        changed: ModelSpec = PAPERS[kind].with_(**options)
        return changed
    raise unknown("model", kind, [*MODELS, *PAPERS])


__all__ = [
    "CNN",
    "KINDS",
    "LSTM",
    "MIXING",
    "MLP",
    "MODELS",
    "PAPERS",
    "Adapters",
    "Augment",
    "Dropout",
    "Factorised",
    "Guided",
    "Hub",
    "Import",
    "Mixture",
    "ModelSpec",
    "ResNet18",
    "Softmax",
    "Transformer",
    "WithMemory",
    "adapted",
    "factorise",
    "head",
    "log_probabilities",
    "merged",
    "penultimate",
    "spec_of",
    "thin",
]

__dir__ = lister(__name__)
