"""Every method with every plug-in: the run finishes, or is rejected for the documented reason.

By default one cell per method and kind of plug-in is run, and a tenth of all others, drawn from a seed that changes
every day and stands in the names of the drawn tests; FEDLOOM_MATRIX_SEED sets it. In CI the seed stays, so that no
change is held up by a cell that the change before it did not have to pass; `make test-full` runs all.

The rules are written down here once more, from the kinds of the upload's fields and the names of the plug-ins alone,
and docs/combinations.md has them with a table for every method. To write that page anew:

    FEDLOOM_WRITE=1 python -m pytest packages/fedloom/tests/engine/test_matrix.py -k page
"""

from __future__ import annotations

import datetime
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fedloom.algorithms import REGISTRY, Algorithm, Kept, Mean, PresetMethod, exact_fields, upload_fields
from fedloom.algorithms._theorems import THEOREM_TABLE
from fedloom.choose import MIXERS, SAMPLERS, WEIGHERS, Uniform
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.data.partitions import MixedSkew
from fedloom.engine.setting import Evaluate, Setting
from fedloom.engine.setup import check, make_job
from fedloom.engine.simulate import simulate
from fedloom.errors import Refused, Stop
from fedloom.lab.experiment.cards import THEOREM_EXAMPLES, method_card, uncovered_parts
from fedloom.local import LocalSGD, Nothing
from fedloom.models import MLP
from fedloom.rows.aggregators import AGGREGATORS
from fedloom.rows.attacks import ATTACKS
from fedloom.rows.channels import CHANNELS
from fedloom.schedule import SCHEDULES
from fedloom.schedule.devices import LogNormal
from fedloom.testing import Problem
from fedloom.testing.federate import ReferenceFederation as Clients

PAGE = Path(__file__).parents[4] / "docs" / "combinations.md"
WEIGHTS = {
    "uniform": "uniform",
    "samples": "samples",
    "clusters": "clusters-2",
    "clusters every k": "clusters-2 every 1",
    "groups": "groups",
    "groups by COLUMN": "groups by region",
}
"""Shares of the clients, each by its name on the page."""
KINDS: dict[str, dict[str, Any]] = {
    "aggregator": AGGREGATORS,
    "attack": ATTACKS,
    "sampler": SAMPLERS,
    "aggregation_weights": WEIGHERS,
    "personalized_aggregation": MIXERS,
    "upload_transform": CHANNELS,
    "client_weights": WEIGHTS,
    "schedule": SCHEDULES,
}

# --- the rules

ASKERS = {"power-of-choice"}
LEARNERS = {"clustered"}
COMPRESSORS = {"top-k", "random-k", "qsgd", "sign"}
PROBING = {"equitable", "fairfed"}
STREAMS = {"buffered", "asynchronous"}
AMONG = {"fedacs", "fedamp", "heurfedamp"}
"""Methods that mix models of a cohort, and with ``among = "all"`` those of all clients."""
SOLVED = {"analytic-fl", "fed3r", "fedhip"}
"""Methods whose server solves a system of its clients' sums."""
PROJECTED = {"lp-proj", "admm-lp-proj", "fedproto", *SOLVED}
"""Methods whose clients and server exchange something smaller than models."""

REASONS = {
    "nothing": ("does not upload anything", "The method has no uploads."),
    "adds": (
        "accumulates uploads over rounds",
        "The server accumulates uploads over rounds, which is correct only with the experiment's client weights.",
    ),
    "noise adds": (
        "noise of every round",
        "The server accumulates uploads over rounds, so it would also accumulate noise.",
    ),
    "mixes": (
        "mixes individual models",
        "The server computes a separate mixture of models for each client, so there is no common aggregate.",
    ),
    "by itself": (
        "averages individual models (itself|with its own weights)",
        "The server averages the clients' models with the method's own rule.",
    ),
    "exact": (
        "divides sums of features by class shares",
        "The server divides feature sums by class counts, so clipping both by the same factor has no effect.",
    ),
    "solved": (
        "the solution of a linear system of sums",
        "The server solves a linear system of sums, and a small change in the sums may change the solution a lot.",
    ),
    "keeps": (
        "stores every client's last upload",
        "The server keeps every client's last upload and computes the weighted mean over all clients.",
    ),
    "projected": (
        "do not upload complete models",
        "Clients and server exchange projections or feature sums, but the plug-in requires models.",
    ),
    "no difference": ("clips differences", "The method uploads absolute values, but only differences can be clipped."),
    "single": (
        "also receives individual",
        "The server also receives individual uploads, which noise on the mean does not protect.",
    ),
    "mixes itself": (
        "mixes individual models for every",
        "The server already computes a mixture of models for each client.",
    ),
    "clusters": ("has a model for each cluster", "The server already has one model per cluster."),
    "consensus": (
        "for a single consensus model, which personalized",
        "The clients' dual or control variables belong to one global model and are invalid for personal models.",
    ),
    "prox": (
        "its server applies a prox to the model",
        "The model is the result of the server's proximal step, which a mixture of client models would bypass.",
    ),
    "smaller": (
        "sends something smaller",
        "The server does not send a model that a mixture could replace.",
    ),
    "sums": ("instead of models. Omit", "The clients send statistics, so there are no models to mix."),
    "no model": (
        "asks clients about the global model",
        "The sampler asks clients to evaluate the global model, but the method has no global model.",
    ),
    "described": (
        "by their activations under the global model",
        "Clustering requires activations of the global model, but the method has no global model.",
    ),
    "one by one": (
        "mixes the models of a round's clients",
        "The server mixes models from one round, but a stream has no rounds.",
    ),
    "asks": (
        "no rounds, so sampler",
        "The sampler queries candidate clients before a round, but a stream has no rounds.",
    ),
}
"""Why a pair is refused: what the error says, and what the page says."""
PARTS_OF_PRESETS = {"aggregation_weights": "weigher"}
"""Attributes of a composition that are not named as the choice of a run."""
CURE = re.compile(
    r"\. (Find|Keep|Leave|Omit|Set|Take|Use|Add|Give|Choose)\b"
    r"|; (or|client_weights)\b|'flame' and 'fedslr'|'fedslr' and 'lpgd'"
)
"""What an error names to be done."""


def has_global_model(method: Algorithm) -> bool:
    p = Problem.random(0)
    ctx = Clients(p.oracle(), p.alpha, LocalSGD()).ctx(0, range(p.n))
    return method.global_model(method.init(p.x0, ctx)[0]) is not None


def refusal(made: PresetMethod, kind: str, plugin: str) -> str | None:
    """The reason why a method refuses a plug-in, or None."""
    method = made.algorithm
    fields = upload_fields(type(method)).values()
    projected = type(method) in {REGISTRY[name] for name in PROJECTED}
    adds = any(field.accumulates for field in fields)
    if made.pooled:
        return None
    if kind == "client_weights":
        return "described" if plugin == "clusters every k" and not has_global_model(method) else None
    if kind == "schedule":
        if plugin not in STREAMS:
            return None
        if made.sampler is not None and made.sampler.kind in ASKERS:
            return "asks"
        return "one by one" if method.mixes and not method.mixes_all else None
    if kind == "sampler":
        if plugin in ASKERS and not has_global_model(method):
            return "no model"
        if plugin in LEARNERS and projected:
            return "projected"
        return "nothing" if plugin in LEARNERS and not fields else None
    if kind == "aggregation_weights" and plugin not in ("shares", "uniform"):
        if any(isinstance(field, Mean) and not field.accumulates for field in fields):
            return "projected" if plugin in PROBING and projected else None
        if not fields:
            return "nothing"
        return "keeps" if any(isinstance(field, Kept) for field in fields) else "adds" if adds else "by itself"
    if not fields:
        return None if kind in ("aggregation_weights", "attack") else "nothing"
    if kind == "personalized_aggregation":
        return own_models(method, fields, projected)
    if kind == "aggregator" and plugin != "mean":
        if (adds and plugin == "private-mean") or (
            method.mixes and (type(method).mixer is Algorithm.mixer or plugin == "private-mean")
        ):
            return "noise adds" if adds else "mixes"
        if any(field.primary and not field.averaged for field in fields):
            return "by itself"
        return central(fields) if plugin == "private-mean" else None
    if kind == "upload_transform" and method.needs_exact is not None:
        return "exact" if type(method) is REGISTRY["fedproto"] else "solved"
    return None


def own_models(method: Algorithm, fields: Any, projected: bool) -> str | None:
    """The reason why clients cannot receive models of their own, or None."""
    if any(field.carries != "model" for field in fields):
        return "sums"
    if method.mixes:
        return "mixes itself"
    if method.family == "clustered":
        return "clusters"
    if type(method).personal is Algorithm.personal:
        if any(field.keeps or field.accumulates for field in fields):
            return "consensus"
        if method.family == "composite":
            return "prox"
    return "smaller" if projected else None


def central(fields: Any) -> str | None:
    """The reason why the server's noise on a mean protects nothing, or None."""
    if any(field.primary and field.base == "zero" for field in fields):
        return "no difference"
    return None if all(isinstance(field, Mean) for field in fields) else "single"


# --- the cells


class Cell(NamedTuple):
    """A method and a plug-in, by name."""

    method: str
    kind: str
    plugin: str


NEEDED: dict[str, dict[str, Any]] = {
    "fedbn": {"layers": ("head.bias",)},  # the model has no normalisation layer
    "fedrep": {"head_epochs": 1},  # sooner done
    "fiaelt": {"iterations": 2, "inner": 5},
}


@cache
def composed(name: str, plugin: str = "") -> PresetMethod:
    among = {"among": "all"} if name in AMONG and plugin in STREAMS else {}
    made: Any = REGISTRY[name](**NEEDED.get(name, {}), **among)
    return made if isinstance(made, PresetMethod) else PresetMethod(made)


def rotation() -> int:
    """The seed of the cells that are drawn: always the same in CI, else of this day."""
    if given := os.environ.get("FEDLOOM_MATRIX_SEED"):
        return int(given)
    return 202648 if os.environ.get("CI") else datetime.datetime.now(datetime.UTC).date().toordinal()


def every_cell() -> tuple[list[Cell], list[Cell]]:
    """Those that are run every time, one for each method and kind of plug-in; and all others."""
    names = sorted(REGISTRY)
    first = [
        Cell(m, kind, list(plugins)[(i + k) % len(plugins)])
        for i, m in enumerate(names)
        for k, (kind, plugins) in enumerate(KINDS.items())
    ]
    every = [Cell(m, kind, p) for m in names for kind, plugins in KINDS.items() for p in plugins]
    return first, sorted(set(every) - set(first))


def drawn(others: list[Cell], seed: int) -> set[Cell]:
    """A tenth of some cells."""
    picked = np.random.default_rng(seed).choice(len(others), len(others) // 10, replace=False)
    return {others[i] for i in picked}


def parameters(seed: int) -> list[Any]:
    """Every cell; those that are not for every time are slow."""
    first, others = every_cell()
    chosen = drawn(others, seed)
    return [
        *(pytest.param(cell, id="-".join(cell)) for cell in first),
        *(
            pytest.param(cell, id="-".join(cell) + f"-seed={seed}")
            if cell in chosen
            else pytest.param(cell, id="-".join(cell), marks=pytest.mark.slow)
            for cell in others
        ),
    ]


@pytest.fixture(scope="module")
def fed() -> Federation:
    return MixedSkew(clients=9, labels_per_client=3, alpha=0.5, min_size=8)(load("digits"), seed=0)


MODEL, ROUNDS = MLP(hidden=(16,)), 2
LOCAL = LocalSGD(lr=0.05, steps=2, batch_size=8)
PARTIAL = Uniform(clients=8)


@cache
def always_there(fed: Federation) -> int:
    """A client that the sampler draws in every round."""
    job, _ = make_job(Setting.create(composed("fedavg"), model=MODEL, rounds=ROUNDS, local=LOCAL), fed)
    cohorts = [set(PARTIAL.apply(Nothing(), None, job.ctx(t))[0].tolist()) for t in range(1, ROUNDS + 1)]
    return min(set.intersection(*cohorts))


@pytest.fixture(scope="module")
def grouped(fed: Federation) -> Federation:
    """The clients in two groups."""
    return in_groups(fed)


def in_groups(fed: Federation) -> Federation:
    """A federation whose clients are in two groups, which a column has too."""
    groups = torch.arange(fed.n) % 2
    codes = torch.zeros(len(fed.data.y), dtype=torch.long)
    for client, group in enumerate(groups.tolist()):
        codes[fed.indices("train", client)] = group
    data = replace(fed.data, columns={"region": codes}, levels={"region": ("north", "south")})
    return replace(fed, data=data, groups=groups)


OPTIONS: dict[str, dict[str, Any]] = {
    "gaussian-noise": {"sigma": 0.01},
    "bernoulli": {"probability": 0.7},
    "availability": {"period": 9, "on": 8},
    "forged-direction": {"scale": 2.0},  # which diverges later
    "deadline": {"seconds": 1e9},
    "buffered": {"buffer": 4, "concurrency": 8},
    "asynchronous": {"concurrency": 8},
    "trimmed-mean": {"f": 1},  # the default adapts to a stream's single upload
    "mda": {"f": 1},
}


def choices_of(kind: str, plugin: str, root: int, clients: int = 4) -> dict[str, Any]:
    """The choices of a run with a plug-in, which has ``clients``, or trusts the client ``root``."""
    make = KINDS[kind][plugin]
    if kind == "client_weights":
        return {"client_weights": make}
    options = {"root": root} if plugin == "fltrust" else OPTIONS.get(plugin, {})
    sized = {"clients": clients} if "clients" in make.model_fields else {}
    return {kind: make(**sized, **options), **({"devices": LogNormal()} if kind == "schedule" else {})}


@pytest.mark.parametrize("cell", parameters(rotation()))
def test_a_pair_runs_or_is_refused_for_its_reason(fed: Federation, grouped: Federation, cell: Cell) -> None:
    settings: dict[str, Any] = {"sampler": PARTIAL, **choices_of(cell.kind, cell.plugin, always_there(fed))}
    if cell.plugin == "forged-activations":
        settings["client_weights"] = "clusters-2"  # activations to forge
    made = composed(cell.method, cell.plugin)
    reason = refusal(made, cell.kind, cell.plugin)

    def run() -> Any:
        evaluate = Evaluate(every=ROUNDS, parts=("train", "validation"))
        clients = grouped if cell.kind == "client_weights" else fed
        return simulate(made, clients, MODEL, rounds=ROUNDS, local=LOCAL, evaluate=evaluate, **settings)

    if reason is not None:
        with pytest.raises(Refused, match=REASONS[reason][0]):
            run()
        return
    result = run()
    if cell.plugin == "fltrust" and composed(cell.method).sampler is not None and result.stop is Stop.TOO_FEW:
        assert "fltrust trusts client" in result.detail
        return
    if (cell.method, cell.plugin) == ("scaffold", "top-k") and result.stop is Stop.UNCHANGED:
        return  # all of the largest entries are changes of controls, which are 1/(K lr) times the model's
    assert result.stop is Stop.DONE, result.detail
    assert result.state.totals[-1] == 0  # no upload was dropped
    for record in result.state.records.items:
        if record.part in ("train", "") and record.round == ROUNDS and record.metric != "staleness":  # of those heard
            assert np.isfinite(record.values).all(), record
    assert all(bool(torch.isfinite(value).all()) for value in result.state.server)
    plugin = getattr(result.job.setting, cell.kind)
    if (
        cell.kind != "client_weights"
        and not made.pooled
        and getattr(made, PARTS_OF_PRESETS.get(cell.kind, cell.kind), None) is None
    ):
        drawn = cell.plugin == "shares" and result.job.setting.sampler.by_samples
        assert plugin.kind == ("uniform" if drawn else cell.plugin)


def test_a_refusal_has_its_reason_and_a_cure(grouped: Federation) -> None:
    daily, others = every_cell()
    wrong = []
    for cell in (*daily, *others):
        made = composed(cell.method, cell.plugin)
        if (reason := refusal(made, cell.kind, cell.plugin)) is None:
            continue
        choices = choices_of(cell.kind, cell.plugin, root=0)
        setting = Setting.create(made, model=MODEL, rounds=ROUNDS, local=LOCAL, **{"sampler": PARTIAL, **choices})
        with pytest.raises(Refused, match=REASONS[reason][0]) as error:
            check(setting, grouped)
        wrong += [] if CURE.search(str(error.value)) else [str(error.value)]
    assert wrong == []


def test_every_plugin_and_every_method_has_its_cell() -> None:
    daily, others = every_cell()
    assert {(c.method, c.kind) for c in daily} == {(m, kind) for m in REGISTRY for kind in KINDS}
    assert {(c.kind, c.plugin) for c in daily} == {(kind, p) for kind, plugins in KINDS.items() for p in plugins}
    assert len(drawn(others, 0)) == len(others) // 10
    assert len(set().union(*(drawn(others, seed) for seed in range(100)))) > 0.99 * len(others)
    assert drawn(others, 1) != drawn(others, 0) == drawn(others, 0)
    assert SAMPLERS.keys() > ASKERS | LEARNERS
    assert CHANNELS.keys() > COMPRESSORS


# --- the page

COLUMNS = (
    ("robust aggregators", "aggregator", "median"),
    ("noise of the server", "aggregator", "private-mean"),
    ("forged uploads", "attack", "gaussian"),
    ("poisoned labels", "attack", "flipped-labels"),
    ("samplers that ask", "sampler", "power-of-choice"),
    ("samplers that learn", "sampler", "clustered"),
    ("weights by samples", "aggregation_weights", "samples"),
    ("weights that ask", "aggregation_weights", "equitable"),
    ("personalized aggregation", "personalized_aggregation", "attention"),
    ("clipping, noise", "upload_transform", "clip"),
    ("compressors", "upload_transform", "top-k"),
    ("clusters every k", "client_weights", "clusters every k"),
    ("streams", "schedule", "buffered"),
)


def declaring(declared: Callable[[Algorithm], object]) -> list[str]:
    """The methods that declare something."""
    return sorted(name for name in REGISTRY if declared(composed(name).algorithm))


def named(declared: Callable[[Algorithm], object]) -> str:
    """The methods that declare something, in words."""
    return ", ".join(declaring(declared))


def enumerated(names: Iterable[str]) -> str:
    """Names with "and" before the last one."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


INTRODUCTION = """# Compatibility

Most methods work with every sampler, aggregator, attack, upload transform, client weighting and schedule, and with all
kinds of aggregation weights and personalized aggregation. A few combinations do not make sense, and fedloom rejects
them before a run starts. For example, a median cannot replace IFCA's aggregation:

```python
import fedloom as fl

fed = fl.partitions.iid(clients=10)(fl.load("digits"), seed=0)
try:
    fl.simulate("ifca", fed, aggregator="median")
except fl.FedloomError as error:
    print(error)
```

One test runs every method with every plug-in and generates this page (`packages/fedloom/tests/engine/test_matrix.py`).
Another test runs every pair of plug-ins (`packages/fedloom/tests/engine/test_pairs.py`). For measurements, see [Effects
of the plug-ins](../studies/pages/system.md).

## Methods and plug-ins

The table lists the methods that do not work with every plug-in. The letter in a cell refers to a reason listed below
the table.

"""

NOTES = f"""
Every method works with the aggregation weights `shares` and `uniform`, and with every sampler except those that
query clients ({", ".join(sorted(ASKERS))}) or learn from uploads ({", ".join(sorted(LEARNERS))}). Every
method with uploads works with the aggregator `mean`. Except for
{enumerated(declaring(lambda method: method.needs_exact))}, these methods also work with all upload transforms. The
compressors are {enumerated(sorted(COMPRESSORS))}. Every
method works with all other client weightings ({", ".join(w for w in WEIGHTS if w != "clusters every k")}) and with the
schedules {enumerated(sorted(SCHEDULES.keys() - STREAMS))}. The schedules {" and ".join(sorted(STREAMS))} are called
streams. FedACS, FedAMP and HeurFedAMP work with streams if `among = "all"`.

## Rules

### Presets and centralized training

- If a preset includes a sampler or aggregation weights, they replace the experiment's sampler or weights. The cohort
  size of the experiment's sampler still applies.
- `centralized` has one client, so fedloom ignores samplers, aggregation weights, aggregators, attacks and upload
  transforms.

### Client weighting

- The client weights (`client_weights`) apply to every method with a weighted mean. Aggregation weights replace them.
  If a sampler draws clients by their number of samples, the clients in its cohort have equal weights. FedACS, FedAMP,
  HeurFedAMP and FedFomo compute their own weights, FedSkip counts the samples that a model has seen, and `local`
  uploads nothing. If the client weights have no effect, fedloom prints a note.
- With `client_weights = "clusters-C"`, every method with client weights optimizes Equitable-FL's objective. fedloom
  finds the clusters before round 1 from the activations of all clients. With `"clusters-C every K"`, fedloom finds the
  clusters again after every K rounds. The sums that the server accumulates over rounds are then adjusted to the new
  weights.
- With `client_weights = "groups by region"`, every level of the column `region` has the same weight. All of a client's
  rows must have the same level in this column. List the column in `data.group_columns`.

### Mixers

- If a method has no personal models, the mixer's mixtures are used as personal models.
- With `mixing_weight = 0`, personalized aggregation leaves the results unchanged to the last bit. Any other mixture
  invalidates theorems about a common problem: FLAME and FedSLR are then no longer ADMM for a sum of local problems.
- A robust aggregator also replaces the weighted mean in each client's mixture, including the mixtures of FedACS,
  FedAMP and HeurFedAMP. If a mixture contains too few models for the robust rule, the client keeps its previous model.
- Personalized aggregation compares the directions of models. In the attack `forged-direction`, an attacker gets its
  model into its victim's mixture. In the attack `sybils`, all attackers send the same vector and thus fill the
  attention's quantile. With the option `copies`, models with the same direction count as one model. FedACS uses
  this option by default, for models whose cosine is at least 0.999.

### Robust aggregators

- A robust aggregator uses the field that contains the model to decide which uploads to trust. If the server keeps every
  client's last upload, the aggregator chooses among all clients seen so far. If the server accumulates changes to
  client state (SCAFFOLD's controls, FedADMM, FIAELT), the aggregator is applied to each client's accumulated sum,
  and the server uses the result. fedloom checks the minimum number of uploads before the run.
- An ADMM message is the sum of a model and a dual variable, so its coordinates vary widely even without an attacker. A
  coordinate-wise median discards most of the dual variables. `multi-krum` averages complete messages from honest
  clients. On digits, if 5 of 20 clients flip signs, the global models of FIAELT, FLAME and FedADMM reach 44, 45 and
  42 %, respectively, with `median`, and 85, 75 and 83 % with `multi-krum` (one seed). Use `median` and `trimmed-mean`
  for uploads that are models or model changes.

### Attacks

- An attacker forges a model, and the method encodes this model in the same way as an honest model. A forged model then
  affects every method as much as FedAvg, unless the paper's server update scales the change. The update
  scales the change in equitable-fl, fedas, feddyn, fedopt, fedproto, fedslr, fedspa, fiaelt, ifca and q-ffl, and in
  FedNova if clients take different numbers of steps. The method pages list the factors. In ADMM methods with one
  message u_i, the attacker forges u_i, as the FLAME paper states. In analytic-fl, fed3r and fedhip, clients send
  statistics, so the attacker forges these statistics. `local` has no uploads, so the attack has no effect, and its
  results exclude the attackers.
- With the attack `forged-activations`, attackers can obtain their own cluster in `client_weights` and in the
  aggregation weights `equitable`. If C is fixed, k attackers control up to k/C of the model, and the honest groups
  share fewer clusters. If fedloom chooses C, a single client cannot form a cluster, but two similar clients can. A
  robust aggregator with equal client weights, such as a median, does not use clusters. Without clusters, fedloom
  rejects this attack.

### Channels and privacy

- An upload transform always applies to the difference from the model that the client received, even if the method
  uploads something else. Compressors use error feedback.
- Parts of the model that are not sent (personal layers) are not compressed, do not receive noise, and do not count as
  traffic.
- If a `delta` is set, `gaussian-noise` and `private-mean` reject aggregation weights and samplers that require
  noise-free values from clients. They also reject methods that upload labels or counts without noise ({
    enumerated(declaring(lambda method: exact_fields(type(method))))
}).

### Local training

Some methods are defined only for plain SGD. They reject the following `[local]` options:

| rejected | methods |
|---|---|
| momentum, and an `optimizer` other than `sgd` | {named(lambda method: method.plain_sgd)} |
| an `optimizer` other than `sgd` | {named(lambda method: method.needs_sgd and not method.plain_sgd)} |
"""


def page() -> str:
    lines = [INTRODUCTION + "| method | " + " | ".join(title for title, _, _ in COLUMNS) + " |"]
    lines += ["|---" * (len(COLUMNS) + 1) + "|"]
    letters = {reason: chr(ord("a") + i) for i, reason in enumerate(REASONS)}
    unrestricted = []
    for name in sorted(REGISTRY):
        reasons = [refusal(composed(name, plugin), kind, plugin) for _, kind, plugin in COLUMNS]
        if not any(reasons):
            unrestricted.append(name)
            continue
        lines.append(f"| {name} | " + " | ".join("yes" if r is None else f"no ({letters[r]})" for r in reasons) + " |")
    lines += ["", f"These methods work with every plug-in in the table: {', '.join(unrestricted)}.", ""]
    first, others = every_cell()
    counts = Counter(refusal(composed(m, plugin), kind, plugin) for m, kind, plugin in (*first, *others))
    admitted, every = counts[None], counts.total()
    lines += [
        f"Of {every} combinations of a method and a plug-in, {admitted} run and {every - admitted} are rejected.",
        "",
    ]
    lines += ["| letter | pairs | reason |", "|---|---|---|"]
    lines += [f"| ({letters[r]}) | {counts[r]} | {sentence} |" for r, (_, sentence) in REASONS.items()]
    return "\n".join(lines) + "\n" + NOTES + "\n" + pairs_of_parts() + "\n" + theorems()


# --- two parts

SEVERAL = {"trimmed-mean", "krum", "multi-krum", "bulyan", "mda", "fltrust"}
"""Aggregators that need more than one row."""
PAIR_REASONS = {
    "activations": (
        "has nothing to forge",
        "Clients do not send activations if the client weights are given.",
    ),
    "waits": (
        "requires all clients' activations between two rounds",
        "fedloom updates clusters between rounds from all clients' activations, which this schedule does not allow.",
    ),
    "asks": REASONS["asks"],
    "honest": (
        "cannot read a round's honest uploads",
        "The attackers read the honest uploads from their round, but a stream has no rounds.",
    ),
    "one row": ("needs m >", "The rule requires several uploads, but every upload is a separate server update."),
    "single models": (
        "mixtures of individual models, but noise added to a mean does not protect",
        "Personalized aggregation sends mixtures of individual models, which noise on the mean does not protect.",
    ),
}
"""Why two parts are refused beside any method: what the error says, and what the page says."""


class Pair(NamedTuple):
    """Two parts, by kind and name."""

    kind: str
    plugin: str
    other: str
    beside: str


def pairs() -> list[Pair]:
    """Every two parts of two kinds."""
    return [Pair(a, p, b, q) for a, b in combinations(KINDS, 2) for p in KINDS[a] for q in KINDS[b]]


def pair_refusal(pair: Pair) -> str | None:
    """The reason why two parts are refused, or None."""
    part = {pair.kind: pair.plugin, pair.other: pair.beside}
    weights, schedule, aggregator = (part.get(kind, "") for kind in ("client_weights", "schedule", "aggregator"))
    attack = part.get("attack", "")
    if attack == "forged-activations" and weights and not weights.startswith("clusters"):
        return "activations"
    if weights == "clusters every k" and schedule not in ("", "synchronous"):
        return "waits"
    if schedule in STREAMS and part.get("sampler") in ASKERS:
        return "asks"
    if schedule in STREAMS and getattr(ATTACKS.get(attack), "sees_honest", False):
        return "honest"
    if schedule == "asynchronous" and aggregator in SEVERAL:
        return "one row"
    return "single models" if aggregator == "private-mean" and "personalized_aggregation" in part else None


def pairs_of_parts() -> str:
    """Write which two parts do not go together, by reason."""
    by_reason: dict[str, list[Pair]] = {reason: [] for reason in PAIR_REASONS}
    for pair in pairs():
        if (reason := pair_refusal(pair)) is not None:
            by_reason[reason].append(pair)
    count = sum(map(len, by_reason.values()))
    lines = [
        "## Pairs of plug-ins\n",
        f"Of {len(pairs())} pairs of plug-ins with FedAvg, {len(pairs()) - count} run and {count} are rejected. Mixers",
        'work with streams if `among = "all"`. The buffer must be as large as the number of clients that a robust rule',
        "needs in a round. The attack `forged-activations` is tested with client weighting by clusters.\n",
        "| plug-ins | with | pairs | reason |",
        "|---|---|---|---|",
    ]
    for reason, refused in by_reason.items():
        plugins, beside = ({getattr(pair, name): None for pair in refused} for name in ("plugin", "beside"))
        cells = (", ".join(plugins), ", ".join(beside), str(len(refused)), PAIR_REASONS[reason][1])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


THEORY = """A paper may prove convergence under certain conditions. The table lists each theorem, its conditions, and
the plug-ins that invalidate it. Runs with such a plug-in work, but the theorem does not apply. The method pages
contain the same information. Papers on other methods may contain theorems that are not listed here.

- fedloom does not check conditions on the problem, such as convexity or the smoothness L of the local losses. Networks
  with ReLU are not smooth.
- Most methods use the run's local training as the local solver without checking its error.
- *Equal shares* means `client_weights = "uniform"`, and *equal steps* means `local.steps`. By default, clients are
  weighted by samples and train for epochs. If clients differ in size, a default run therefore has neither equal shares
  nor equal steps.
- *A gradient step* is a step of plain SGD, without momentum, clipping or another optimizer.
- *A uniform cohort* comes from the sampler `uniform` with a fixed size.
- *Among others* means that the paper has additional conditions.
"""


def theorems() -> str:
    """Write the table of what the papers prove, and of the parts that lose it."""
    lines = [
        "## Theorems\n",
        THEORY,
        "| method | theorem | conditions | invalidated by |\n|---|---|---|---|",
    ]
    for name, theorem in sorted(THEOREM_TABLE.items()):
        needs = f"{theorem.needs}. {theorem.defaults}".removesuffix(". ")
        examples = ", ".join(THEOREM_EXAMPLES[kind][0] for kind in uncovered_parts(name))
        lines.append(f"| {name} | {theorem.proves} | {needs} | {examples} |")
    return "\n".join(lines) + "\n"


def test_a_theorem_is_lost_by_the_parts_that_a_method_takes_and_its_paper_has_not() -> None:
    for name, theorem in THEOREM_TABLE.items():
        made, lost = composed(name), set(uncovered_parts(name))
        taken = {k for k, plugin in (
            ("aggregation_weights", "samples"), ("personalized_aggregation", "attention"), ("aggregator", "median"),
            ("upload_transform", "top-k")) if refusal(made, k, plugin) is None}  # fmt: skip
        taken -= {"aggregation_weights"} if made.weigher is not None else set()
        assert lost == (taken | {"sampler", "schedule", "attack"}) - {*theorem.covers}
        assert all(THEOREM_EXAMPLES[kind][0] in " ".join(method_card(name).split()) for kind in lost)
    assert "Theory:" not in method_card("moon")


def test_theorems_name_the_defaults_that_miss_their_conditions(fed: Federation) -> None:
    job, _ = make_job(
        Setting.create(composed("flame"), model=MODEL, rounds=ROUNDS, local=LOCAL, client_weights="samples"), fed
    )
    ctx, defaults = job.ctx(1), {name: composed(name).algorithm for name in THEOREM_TABLE}
    lam, rho = (defaults["flame"].derived(ctx)[name] for name in ("lam", "rho"))
    ratios = lam * ctx.weight.flatten().double() / rho  # lam alpha_i / rho
    assert not ((ratios <= 1) & (ratios**2 * (1 + rho) < rho * (ratios + 1) / 2)).all()
    assert defaults["pfedme"].derived(ctx)["eta"] * defaults["pfedme"].derived(ctx)["lam"] == pytest.approx(1)
    assert (defaults["fedacs"].lam, defaults["fedadmm-inexact"].rho) == (None, None)
    assert defaults["fedsplit"].derived(ctx) == {"step": 2 * ctx.reach}
    assert (defaults["fedopt"].optimiser, defaults["fedopt"].beta1, LocalSGD().schedule) == ("adam", None, "constant")
    assert (defaults["fiaelt"].tau, defaults["fiaelt"].r, defaults["fiaelt"].solver) == (0.5, 0.005, "sgd")
    assert (defaults["fedpd"].skip, defaults["fedadmm"].server_lr) == (0, "fraction")


def test_page_is_up_to_date() -> None:
    for _, kind, example in COLUMNS:  # a column stands for all plug-ins that are refused for the same reason
        like = [p for p in KINDS[kind] if all(refusal(composed(m, p), kind, p) == refusal(composed(m, p), kind, example)
                                              for m in REGISTRY)]  # fmt: skip
        assert example in like
    if os.environ.get("FEDLOOM_WRITE"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "write docs/combinations.md anew: see the beginning of this file"
