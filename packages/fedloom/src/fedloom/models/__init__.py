"""Model specifications: ``MODELS`` by kind, ``PAPER_NETWORKS`` by name, parts of models, and augmentation."""

from __future__ import annotations

from fedloom.hints import unknown_name_error
from fedloom.lazy import make_dir
from fedloom.models.adapters import Adapters, add_adapters, merge_adapters
from fedloom.models.augment import Augment
from fedloom.models.dropout import Dropout
from fedloom.models.factors import Factorized, factorize, make_thin_copy
from fedloom.models.guided import Guided
from fedloom.models.hub import Hub
from fedloom.models.imported import Import
from fedloom.models.memory import WithMemory
from fedloom.models.mixture import MIXING, Mixture, log_probabilities
from fedloom.models.nets import CNN, MLP, Softmax
from fedloom.models.papers import PAPER_NETWORKS, preset_class
from fedloom.models.parts import head_prefixes, penultimate_layer
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
"""Classes of model specifications, keyed by the value of ``kind`` in the ``[model]`` table of an experiment file."""
MODEL_CLASSES: dict[str, type[ModelSpec]] = {**MODELS, **{name: preset_class(name) for name in PAPER_NETWORKS}}
"""Classes for all kinds in `MODELS` and all networks in `PAPER_NETWORKS`, with a run's default values."""


def make_spec(kind: str, **options: object) -> ModelSpec:
    """Return the specification of a kind in `MODELS` or a name in `PAPER_NETWORKS`, with the given fields changed.

    Raises:
        ConfigError: the kind or a field is unknown, or a value is out of range.

    >>> make_spec("mlp", hidden=[64]).hidden
    (64,)
    >>> make_spec("lenet", padding=2).hidden
    (120, 84)
    """
    if kind in MODELS:
        return MODELS[kind](**options)
    if kind in PAPER_NETWORKS:
        changed: ModelSpec = PAPER_NETWORKS[kind].with_(**options)
        return changed
    raise unknown_name_error("model", kind, [*MODELS, *PAPER_NETWORKS])


__all__ = [
    "CNN",
    "LSTM",
    "MIXING",
    "MLP",
    "MODELS",
    "MODEL_CLASSES",
    "PAPER_NETWORKS",
    "Adapters",
    "Augment",
    "Dropout",
    "Factorized",
    "Guided",
    "Hub",
    "Import",
    "Mixture",
    "ModelSpec",
    "ResNet18",
    "Softmax",
    "Transformer",
    "WithMemory",
    "add_adapters",
    "factorize",
    "head_prefixes",
    "log_probabilities",
    "make_spec",
    "make_thin_copy",
    "merge_adapters",
    "penultimate_layer",
]  # fmt: skip

__dir__ = make_dir(__name__)
