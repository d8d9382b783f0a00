"""Settings that cannot work, each with the rule that refuses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

HERE = "tests.impossible"
CLIENTS, ROWS, WIDTH, CLASSES = 6, 20, 5, 3


def make_bare() -> nn.Module:
    """A model without a layer below its head."""
    return nn.Linear(WIDTH, CLASSES)


def make_flat() -> nn.Module:
    """A model that wraps its only layer."""
    return nn.Sequential(nn.Linear(WIDTH, CLASSES))


def make_infinite() -> nn.Module:
    """A model that cannot be trained, because a parameter is infinite."""
    net = make_net()
    with torch.no_grad():
        next(net.parameters())[0, 0] = torch.inf
    return net


def make_net() -> nn.Module:
    """A model with a body and a head."""
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, CLASSES))


class Branching(nn.Module):
    """A model that vmap rejects."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        hidden = self.body(x)
        out: Tensor = self.head(hidden * 2 if hidden.sum().item() > 0 else hidden)
        return out


def summed(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss that is a sum."""
    return nn.functional.cross_entropy(outputs, y, reduction="sum")


def likelihood(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss of log probabilities, which the models do not return."""
    return nn.functional.nll_loss(outputs, y)


def single(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss of every sample."""
    return nn.functional.cross_entropy(outputs, y, reduction="none")


def averaged(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss as it should be."""
    return nn.functional.cross_entropy(outputs, y)


Kind = Literal["classes", "numbers", "two", "censored", "late"]
Entrance = Literal["simulate", "compare", "run", "tune", "scikit-learn", "Flower", "deploy"]
ENTRANCES: tuple[Entrance, ...] = ("simulate", "compare", "run", "tune", "scikit-learn", "Flower", "deploy")

LOCAL = {"lr": 0.1, "batch_size": 5}


@dataclass(frozen=True)
class Row:
    """A setting that cannot work.

    Attributes:
        name: what it is, in a few words.
        rule: id of the check that refuses it.
        method: a name of the registry.
        options: of the method.
        choices: tables and keys of an experiment file.
        data: what the targets are: one of three classes, one of two, a number, times without an event, or times with an
            event only at each client's largest time.
        model: a function of this module that makes the model, or a name of fedloom's.
        not_at: the entrances that cannot express it, with the reason.
    """

    name: str
    rule: str
    method: str = "fedavg"
    choices: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Kind = "classes"
    model: str = "make_net"
    not_at: Mapping[Entrance, str] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[Entrance, str]:
        """Why some entrances cannot express the setting."""
        tables = self.choices.keys()
        reasons: dict[Entrance, str] = {**self.not_at}
        virtual = "is of virtual time, and real clients take their own"
        for table in ("devices", "schedule"):
            if table in tables:
                reasons |= {"Flower": f"{table} {virtual}", "deploy": f"{table} {virtual}"}
        if "attack" in tables:
            reasons |= dict.fromkeys(("Flower", "deploy"), "attacks exist only in simulations")
        if self.data in ("censored", "late"):
            reasons |= dict.fromkeys(("scikit-learn", "Flower"), "has no targets that are times")
        if "task" in tables:
            reasons["Flower"] = "the loss and the metrics are those of the nodes"
        if str(self.choices.get("client_weights", "")).startswith("clusters"):
            reasons |= dict.fromkeys(("Flower", "deploy"), "clusters are found where all samples are in one place")
        return reasons


def _rows() -> list[Row]:
    krum = {"kind": "krum", "f": 2}
    equitable, clustered, asking = (
        {"kind": "equitable"},
        {"kind": "clustered", "clients": 3},
        {"kind": "power-of-choice"},
    )
    mixer = {"kind": "proximity"}
    timed = {"devices": {"kind": "equal"}}
    private = {"kind": "private-mean"}
    rows = [
        # methods and local training
        Row("SCAFFOLD with momentum", "method-momentum", "scaffold", {"local": {**LOCAL, "momentum": 0.9}}),
        Row("SCAFFOLD with Adam", "method-optimizer", "scaffold", {"local": {**LOCAL, "optimizer": "adam"}}),
        Row("FedNova with Adam", "method-optimizer", "fednova", {"local": {**LOCAL, "optimizer": "adam"}}),
        Row("gradient clipping with full gradients",
            "full-gradients", "fedadmm-inexact", {"local": {**LOCAL, "clip": 1.0}}),
        Row("zero epochs", "no-local-step", choices={"local": {**LOCAL, "epochs": 0}}),
        Row(
            "zero steps",
            "no-local-step",
            choices={"local": {**LOCAL, "steps": 0}},
            not_at={"scikit-learn": "epochs is an argument of the estimator"},
        ),
        Row("a step size of 1e-50", "step-size-zero", choices={"local": {**LOCAL, "lr": 1e-50}}),
        Row(
            "a cosine schedule that ends before the run",
            "step-size-vanishes",
            choices={"local": {**LOCAL, "schedule": "cosine", "decay_rounds": 2}, "rounds": 3},
        ),
        Row("FedBN without normalization layers", "method-fedbn", "fedbn"),
        # weighers, aggregators, channels, mixers
        Row("FedDyn with aggregation weights", "weigher-without-effect", "feddyn", {"aggregation_weights": equitable}),
        Row("local training with aggregation weights",
            "weigher-without-effect", "local", {"aggregation_weights": equitable}),
        Row("local training with a median", "aggregator-without-upload", "local", {"aggregator": {"kind": "median"}}),
        Row("local training with an upload transform",
            "channel-without-upload", "local", {"upload_transform": {"kind": "sign"}}),
        Row("central noise on accumulated sums", "noise-adds-up", "feddyn", {"aggregator": private}),
        Row("FedFomo with a median", "aggregator-on-mixing", "fedfomo", {"aggregator": {"kind": "median"}}),
        Row("CFL with a median", "aggregator-on-single-models", "cfl", {"aggregator": {"kind": "median"}}),
        Row("FedProto with sign compression",
            "channel-on-exact-sums", "fedproto", {"upload_transform": {"kind": "sign"}}),
        Row("local training with a mixer", "mixer-without-upload", "local", {"personalized_aggregation": mixer}),
        Row("FedAMP with a mixer", "mixer-on-mixing", "fedamp", {"personalized_aggregation": mixer}),
        Row(
            "a mixer with central noise", "mixer-under-central-noise",
            choices={"personalized_aggregation": mixer, "aggregator": private},
        ),
        Row("IFCA with a mixer", "mixer-on-clusters", "ifca", {"personalized_aggregation": mixer}),
        Row("FedDyn with a mixer", "mixer-on-consensus", "feddyn", {"personalized_aggregation": mixer}),
        Row("FedMiD with a mixer", "mixer-on-server-prox", "fedmid", {"personalized_aggregation": mixer}),
        Row("FedProto with a mixer", "mixer-needs-one-model", "fedproto", {"personalized_aggregation": mixer}),
        Row("more clusters than clients", "mixer-clusters", choices={
            "personalized_aggregation": {"kind": "clusters", "clusters": 9}
        }),
        Row(
            "noise on absolute values instead of differences",
            "noise-needs-differences", "feddr", {"aggregator": private},
        ),
        Row("noise on the mean, but not on individual uploads",
            "noise-misses-single-uploads", "fedpac", {"aggregator": private}),
        # samplers
        Row("a sampler that needs uploads", "sampler-without-upload", "local", {"sampler": clustered}),
        Row("a sampler that needs a global model", "sampler-needs-a-global-model", "fedrep", {"sampler": asking}),
        Row("too many clients per round", "sampler-clients", choices={"sampler": {"kind": "uniform", "clients": 9}}),
        Row(
            "a table with the wrong number of clients",
            "sampler-table",
            choices={"sampler": {"kind": "availability", "table": [[1, 0]]}},
        ),
        Row(
            "a round without clients",
            "sampler-empty-round",
            choices={"sampler": {"kind": "availability", "table": [[1] * 6, [0] * 6]}},
        ),
        Row(
            "more candidates than clients",
            "sampler-power-of-choice",
            choices={"sampler": {"kind": "power-of-choice", "clients": 2, "candidates": 9}},
        ),
        # robust rules
        Row("Krum with f = 2 and 6 clients", "cohort-too-small", choices={"aggregator": krum}),
        Row(
            "a trimmed mean that drops half of the clients",
            "cohort-too-small",
            choices={"aggregator": {"kind": "trimmed-mean", "f": 2}, "sampler": {"kind": "uniform", "fraction": 0.5}},
        ),
        Row(
            "a trimmed mean with random cohort sizes",
            "cohort-too-small",
            choices={
                "aggregator": {"kind": "trimmed-mean", "f": 1},
                "sampler": {"kind": "bernoulli", "probability": 0.7},
                "rounds": 300,
            },
        ),
        Row(
            "Krum with clients that may be drawn twice",
            "cohort-too-small",
            choices={"aggregator": {"kind": "krum", "f": 1}, "sampler": {"kind": "size-weighted"}, "rounds": 40},
        ),
        Row("a rule that averages more models than there are clients",
            "cohort-too-small", choices={"aggregator": {"kind": "multi-krum", "k": 9}}),
        Row("averaging of nearest neighbors without neighbors", "cohort-too-small", choices={
            "aggregator": {"kind": "mean", "pre": [{"kind": "nnm", "f": 6}]}
        }),
        Row("a trusted client that does not exist", "trusted-client-missing", choices={
            "aggregator": {"kind": "fltrust", "root": 9}
        }),
        Row("a trusted client that misses rounds", "trusted-client-absent", choices={
            "aggregator": {"kind": "fltrust"}, "sampler": {"kind": "uniform", "fraction": 0.5}, "rounds": 40
        }),
        # virtual time
        Row("a deadline without simulated devices", "schedule-needs-devices", choices={
            "schedule": {"kind": "deadline", "seconds": 9.0}
        }),
        Row("FedAvg with partial work", "partial-work", choices={
            "schedule": {"kind": "deadline", "seconds": 9.0, "partial": True}, **timed
        }),
        Row("a deadline that no client meets", "deadline-unmet", choices={
            "schedule": {"kind": "deadline", "seconds": 0.01}, **timed
        }),
        Row("a timeout that no client meets", "deadline-unmet", choices={
            "schedule": {"kind": "buffered", "buffer": 2, "timeout": 0.01}, **timed
        }),
        Row("power-of-choice with asynchronous training", "stream-asks-candidates", choices={
            "schedule": {"kind": "buffered", "buffer": 2}, "sampler": asking, **timed
        }),
        Row("FedAMP with asynchronous training", "stream-mixes-a-round", "fedamp", {
            "schedule": {"kind": "buffered", "buffer": 2}, **timed
        }),
        Row("random cohort sizes with asynchronous training", "stream-concurrency", choices={
            "schedule": {"kind": "buffered", "buffer": 2}, "sampler": {"kind": "bernoulli"}, **timed
        }),
        Row("a buffer larger than the number of clients", "schedule-buffer", choices={
            "schedule": {"kind": "buffered", "buffer": 9}, **timed
        }),
        Row("more concurrent clients than clients in total", "schedule-concurrency", choices={
            "schedule": {"kind": "buffered", "buffer": 2, "concurrency": 9}, **timed
        }),
        Row("an attack that reads honest uploads, with asynchronous training", "stream-attack-on-a-round", choices={
            "schedule": {"kind": "buffered", "buffer": 2}, "attack": {"kind": "alie", "fraction": 0.2}, **timed
        }),
        # shares and attacks
        Row("clustering without a global model", "clusters-need-a-global-model", "fedrep", {
            "client_weights": "clusters-2 every 1"
        }),
        Row("repeated clustering with asynchronous training", "clusters-need-rounds", choices={
            "client_weights": "clusters-2 every 1", "schedule": {"kind": "buffered", "buffer": 2}, **timed
        }),
        Row("group weights without groups", "shares-need-groups", choices={"client_weights": "groups"}),
        Row("too few client weights", "shares-of-other-clients", choices={"client_weights": [1.0, 2.0]}),
        Row("a round in which all clients have weight 0", "cohort-without-weight", choices={
            "client_weights": [0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
            "sampler": {"kind": "availability", "table": [[1, 0, 0, 0, 0, 0]]},
        }),
        Row("forged activations without clusters", "attack-without-target", choices={
            "attack": {"kind": "forged-activations", "fraction": 0.2}
        }),
        Row("label flipping in a regression", "attack-needs-classes", choices={
            "attack": {"kind": "flipped-labels", "fraction": 0.2}
        }, data="numbers", model="softmax"),
        # models, losses, tasks
        Row("DBE with a single layer", "head-missing", "dbe", model="make_bare"),
        Row("MOON with a single layer", "head-missing", "moon", model="make_bare"),
        Row("FedPAC with a single layer", "head-missing", "fedpac", model="make_bare"),
        Row("FedProto without a representation", "representation-missing", "fedproto", model="make_flat"),
        Row("a loss that sums over the batch", "loss-is-a-sum", choices={"task": {"loss": f"{HERE}:summed"}}),
        Row("a loss that expects log probabilities",
            "loss-is-unbounded", choices={"task": {"loss": f"{HERE}:likelihood"}}),
        Row("a loss that returns one value per sample",
            "loss-per-sample", choices={"task": {"loss": f"{HERE}:single"}}),
        Row("class weights in a regression",
            "class-weights-need-classes", choices={"task": {"class_weights": "balanced"}},
            data="numbers", model="softmax"),
        Row("two class weights for three classes", "class-weights-of-other-classes", choices={
            "task": {"class_weights": [1.0, 2.0]}
        }),
        Row("recalibration with three classes", "calibrate-needs-two-classes", choices={"task": {"calibrate": True}}),
        Row("a horizon without survival times", "horizon-needs-survival", choices={"task": {"horizon": 5.0}}),
        Row("AUROC with three classes", "metric-undefined", choices={"task": {"metrics": ["auroc"]}}),
        Row("a backdoor in a table without columns", "backdoor-without-columns", choices={
            "attack": {"kind": "backdoor", "fraction": 0.2}
        }, not_at={"scikit-learn": "its columns have other names"}),
        Row("early stopping on a part that is not evaluated", "early-stop-part", choices={
            "early_stop": {"patience": 2}, "evaluate": {"parts": ["test"]}
        }, not_at=dict.fromkeys(("Flower", "deploy"), "early stopping exists only in simulations")),
        Row("early stopping on a personal model of FedAvg", "early-stop-model", choices={
            "early_stop": {"part": "train", "model": "personal"}, "evaluate": {"parts": ["train", "test"]}
        }, not_at=dict.fromkeys(("Flower", "deploy"), "early stopping exists only in simulations")),
        Row("early stopping on AUROC with three classes", "early-stop-metric", choices={
            "early_stop": {"part": "train", "metric": "auroc"}, "evaluate": {"parts": ["train", "test"]}
        }, not_at=dict.fromkeys(("Flower", "deploy"), "early stopping exists only in simulations")),
        Row("survival times without events", "nothing-to-learn", data="censored", model="mlp"),
        Row("survival events when no other row is at risk", "nothing-to-learn", data="late", model="mlp"),
        Row("an infinite parameter", "initial-model-not-finite", model="make_infinite"),
        Row("random crops for tabular data", "augment-needs-images", choices={"augment": {"flip": 0.5}}),
        # how it is computed
        Row("a GPU that is missing", "device-missing", choices={"engine": {"device": "cuda:7"}},
            not_at={"Flower": "a node names its own device"}),
        Row("compiled loops for a model with branches",
            "oracle-fused", choices={"engine": {"gradient_engine": "compiled"}},
            model="Branching"),
        Row("a model that vmap does not support", "oracle-stacked", choices={"engine": {"gradient_engine": "vmap"}},
            model="Branching"),
        Row("TF32 without a GPU", "precision-missing", choices={"engine": {"precision": "tf32", "dtype": "float32"}}),
        # privacy
        Row("epsilon with exact counts", "epsilon-misses-fields", "ifca", {
            "upload_transform": {"kind": "gaussian-noise", "delta": 1e-5}
        }),
        Row("epsilon with noise-free answers to queries", "epsilon-misses-answers", choices={
            "upload_transform": {"kind": "gaussian-noise", "delta": 1e-5}, "aggregation_weights": equitable
        }),
    ]  # fmt: skip
    return rows


ROWS_OF_TABLE = _rows()


def samples(kind: Kind, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows ``[N, WIDTH]`` and targets of all clients."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(CLIENTS * ROWS, WIDTH, generator=g)
    if kind == "numbers":
        return x, x[:, :1] + x[:, 1:2]
    if kind in ("censored", "late"):
        place = torch.arange(len(x))
        # the partition deals rows to clients at random, so that only the row that outlives all others has an event
        event = (place == len(x) - 1) & (kind == "late")
        return x, torch.stack([place + 1.0, event.float()], 1)
    classes = 2 if kind == "two" else CLASSES
    return x, torch.arange(len(x)) % classes
