"""A forged model moves every method as far as it moves FedAvg, or as far as the paper's own server step takes it.

One of five equal clients attacks, all take part, and honest clients take steps that are too small to matter. The model
that the server has after the round is compared with the model that it has if the attacker sends what it has trained.
`STEPS` has the server step of each paper that is more than the mean of the clients' models. Its methods say so on
their cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, NamedTuple

import pytest
import torch
from torch import Generator, Tensor

from fedloom.algorithms import REGISTRY, FedNova
from fedloom.algorithms._base import Algorithm
from fedloom.data import load
from fedloom.data.federation import Federation
from fedloom.data.partitions import Iid, QuantitySkew
from fedloom.engine.clients import forging
from fedloom.engine.result import Result
from fedloom.engine.setting import Evaluate
from fedloom.engine.setup import make_job
from fedloom.engine.simulate import simulate
from fedloom.lab.experiment.cards import method_card
from fedloom.local import LocalSGD
from fedloom.models import MLP
from fedloom.rows.attacks import ATTACKS, Forgery

CLIENTS = 5
FORGERIES = {name: kind for name, kind in ATTACKS.items() if issubclass(kind, Forgery)}
NOT_ATTACKED = {"local", "centralized"}
"""Uploads nothing, and has one client."""
OPTIONS: dict[str, dict[str, Any]] = {
    "equitable-fl": {"clusters": 2},
    "fedbn": {"layers": ("head.bias",)},  # the model has no normalisation layer
    "fedrep": {"head_epochs": 1},  # sooner done
    "fedslr": {"lam": 0.0},  # no prox after the step
    "perfedavg": {"variant": "fo"},  # sooner done
}


class Honest(Forgery):
    """What the attackers would send if they were honest."""

    trains: ClassVar[bool] = True
    kind: Literal["honest"] = "honest"

    def forge(self, honest: Tensor | None, base: Tensor, benign: Tensor, m: int, gens: Sequence[Generator]) -> Tensor:
        return benign.clone()


class Sent(NamedTuple):
    """What attackers sent: ``models [b, .]`` by client, and all that they made of them."""

    models: dict[int, Tensor]
    upload: Any
    inputs: Any

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        """Those of `Algorithm.ranges`."""
        return self.inputs.down, self.upload, self.inputs.work


@contextmanager
def seen() -> Iterator[list[Sent]]:
    """What the attackers of the runs within send."""
    sent, encoded = list[Sent](), forging.encode_models

    def look(job: Any, inputs: Any, models: Tensor, idle: Any) -> Any:
        upload, rows = encoded(job, inputs, models, idle)
        sent.append(Sent(dict(zip(inputs.work.ids.tolist(), models.clone(), strict=True)), upload, inputs))
        return upload, rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forging, "encode_models", look)
        yield sent


@cache
def federation() -> Federation:
    return Iid(clients=CLIENTS)(load("digits"), seed=0)


def run(name: str | Algorithm, attack: Forgery | None = None, fed: Federation | None = None, **choices: Any) -> Result:
    made: Any = REGISTRY[name](**OPTIONS.get(name, {})) if isinstance(name, str) else name
    size: Any = "full" if name == "fedas" else 20  # its server weighs by Fisher information, a sum over batches
    choices = {"rounds": 1, "client_weights": "uniform", "local": LocalSGD(lr=0.01, batch_size=size)} | choices
    evaluate = Evaluate(every=choices["rounds"])
    return simulate(made, fed or federation(), MLP(hidden=(16,)), attack=attack, evaluate=evaluate, **choices)


def held(result: Result) -> Tensor:
    """The model that the clients' uploads have made, of a part only what travels."""
    job, server = result.job, result.state.server
    if job.algorithm.mixes:
        mean: Tensor = getattr(job.kept.read(job.everyone), job.primary).mean(0)
        return mean
    if hasattr(server, "more"):  # IFCA: the models of all clusters, of which an attacker changes one
        return server.x + server.more.view(-1, len(server.x)).sum(0)
    if job.fields[job.primary].carries == "statistics":  # sums of clients, from which the model follows
        return server.total
    down = job.down(server, result.rounds + 1)[0]
    return travelling(result, down if down.dim() == 1 else down.mean(0))


def travelling(result: Result, models: Tensor) -> Tensor:
    """The coordinates of models that clients send."""
    mask = result.job.messages.masks.get(result.job.primary)
    return models if mask is None else models[..., mask]


# ------------------------------------------------------------------------------------- server steps of the papers


class Round(NamedTuple):
    """A round: its run, and the models ``[n, .]`` that all clients sent, in the order of their ids."""

    result: Any
    models: Tensor

    @property
    def x(self) -> Tensor:
        """The model before the round."""
        return start_of(self.result)

    def losses(self, model: Tensor) -> Tensor:
        """F_i ``[n, 1]`` of a model."""
        job = self.result.job
        return job.work(1, job.everyone).loss(model)


def start_of(result: Result, fed: Federation | None = None) -> Tensor:
    """The model that clients received in round 1."""
    job, server, *_ = make_job(result.job.setting, fed or federation())
    start: Tensor = job.down(server, 1)[0]
    return start


def repeated(r: Round, factor: float = 1.0) -> Tensor:
    """The dual has the change of the mean once more, ``factor`` times."""
    mean = r.models.mean(0)
    return mean + factor * (mean - r.x)


def fiaelt(r: Round) -> Tensor:
    """Line 6: y = mean x_i + mean z_i/beta; line 4: z_i = tau beta (x_i - y) in the first round."""
    return repeated(r, r.result.job.algorithm.tau)


def adam(r: Round) -> Tensor:
    """Algorithm 2, line 12: x + eta m/(sqrt(v) + tau) of the mean change, m_0 = 0, v_0 = tau^2."""
    a, change = r.result.job.algorithm, r.models.mean(0) - r.x
    v = a.beta2 * a.tau**2 + (1 - a.beta2) * change.square()
    return r.x + a.server_lr * 0.1 * change / (v.sqrt() + a.tau)


def q_fedavg(r: Round) -> Tensor:
    """x + sum F_k^q (w_k - x) / sum h_k, h_k = q F_k^(q-1) L ||w_k - x||^2 + F_k^q: a long change slows all down."""
    a, change, f = r.result.job.algorithm, r.models - r.x, r.losses(r.x)
    h = a.q * f ** (a.q - 1) * a.lipschitz * change.square().sum(1, keepdim=True) + f**a.q
    return r.x + (f**a.q * change).sum(0) / h.sum()


def ifca(r: Round) -> Tensor:
    """theta_j is the mean of the models of cluster j alone."""
    server = make_job(r.result.job.setting, federation())[1]
    models = torch.cat([server.x, server.more]).view(-1, len(server.x))
    choice = torch.cat([r.losses(model) for model in models], 1).argmin(1)
    rows = [r.models[choice == j].mean(0) if bool((choice == j).any()) else models[j] for j in range(len(models))]
    return torch.stack(rows).sum(0)


def equitable(r: Round) -> Tensor:
    """Eq. 6: p_i = 1/(C |cluster of i|); attackers whose activations differ are a cluster of their own."""
    labels = r.result.state.weigher.labels
    size = labels.bincount()
    return ((1 / ((size > 0).sum() * size[labels])).to(r.models)[:, None] * r.models).sum(0)


def by_fisher(r: Round) -> Tensor:
    """Bodies count by the squared gradient of all samples at the client's model, with its own head."""
    job = r.result.job
    fisher = job.work(1, job.everyone).full_grad(r.models).square().sum(1, keepdim=True)
    return travelling(r.result, (fisher / fisher.sum() * r.models).sum(0))


def masked(r: Round) -> Tensor:
    """w_{t+1} = w_t - mean of U_i, where U_i is 0 outside the client's mask."""
    mask = r.result.job.clients.template.mask
    return r.x + (mask * (r.models - r.x)).mean(0)


def by_class(r: Round) -> Tensor:
    """Eq. 6: the mean of a class over clients is by their samples of the class."""
    job = r.result.job
    count = job.work(1, job.everyone).class_counts.to(r.models) / job.work(1, job.everyone).sizes
    return ((count[:, :, None] * r.models.view(*count.shape, -1)).sum(0) / count.sum(0)[:, None]).flatten()


def of_sums(r: Round) -> Tensor:
    """The mean of the clients' statistics."""
    return r.models.mean(0)


STEPS: dict[str, Callable[[Round], Tensor]] = {
    "analytic-fl": of_sums,
    "fed3r": of_sums,
    "fedhip": of_sums,
    "equitable-fl": equitable,
    "fedas": by_fisher,
    "feddyn": repeated,  # Algorithm 1: theta = mean - h/alpha, h = -alpha (mean - theta)
    "fedopt": adam,
    "fedproto": by_class,
    "fedslr": repeated,  # Algorithm 3 and Eq. 6: x = mean - eta_g gamma, gamma = -(mean - x)/eta_g
    "fedspa": masked,
    "fiaelt": fiaelt,
    "ifca": ifca,
    "q-ffl": q_fedavg,
}
"""The server steps that are more than the mean of the clients' models, with everyone and from the first state on."""


def mean(r: Round) -> Tensor:
    return travelling(r.result, r.models.mean(0))


# --------------------------------------------------------------------------------------------------------- the laws


@cache
def honest_round(name: str) -> Round:
    """The round in which every client sends what it has trained, through the door of the attackers."""
    with seen() as sent:
        result = run(name, Honest(fraction=1.0))
    models = {i: model for s in sent for i, model in s.models.items()}
    return Round(result, torch.stack([models[i] for i in range(CLIENTS)]))


@pytest.mark.parametrize("name", sorted({*REGISTRY} - NOT_ATTACKED))
def test_a_model_that_a_client_has_trained_moves_the_server_alike_where_it_is_forged(name: str) -> None:
    torch.testing.assert_close(held(honest_round(name).result), held(run(name)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted({*REGISTRY} - NOT_ATTACKED))
def test_a_forged_model_moves_the_server_as_the_paper_says(name: str) -> None:
    step, honest = STEPS.get(name, mean), honest_round(name)
    for kind, attack in FORGERIES.items():
        with seen() as sent:
            result = run(name, attack(fraction=1 / CLIENTS))
        ((attacker, model),) = sent[0].models.items()
        models = honest.models.clone()
        models[attacker] = model
        moved = held(result) - held(honest.result)
        wanted = step(Round(result, models)) - step(honest)
        assert (moved - wanted).norm() <= 0.01 * wanted.norm() + 1e-7, kind
        if find_spec("fedloom_sites") is not None:
            protocol = import_module("fedloom_sites.deploy.protocol.lengths")
            refused = protocol.values_out_of_range(sent[0].upload, result.job.algorithm.ranges(*sent[0].arguments))
            assert not [*refused], f"{kind}: a deployed server would not take the upload"


FROZEN = LocalSGD(lr=1e-4, batch_size=20)
BLIND = ["sign-flip", "same-value", "gaussian", "sybils"]
"""Attacks that make the same model for all methods whose clients receive the same."""


@pytest.mark.parametrize("name", sorted({*REGISTRY} - NOT_ATTACKED - {*STEPS, "admm-lp-proj", "lp-proj"}))
def test_one_attacker_moves_a_method_as_far_as_fedavg(name: str) -> None:
    """Of a method whose clients keep a part, as far as FedAvg in what they send."""

    def moved(method: str, kind: str) -> Tensor:
        attacked, still = (run(method, a, local=FROZEN) for a in (FORGERIES[kind](fraction=1 / CLIENTS), None))
        return held(attacked) - held(still)

    for kind in BLIND:
        mask = run(name, local=FROZEN).job.messages.masks
        plain = moved("fedavg", kind)
        wanted = float((plain[next(iter(mask.values()))] if mask else plain).norm())
        assert float(moved(name, kind).norm()) == pytest.approx(wanted, rel=0.01), kind


@pytest.mark.parametrize("name", sorted(STEPS))
def test_a_card_says_how_far_a_forged_model_goes(name: str) -> None:
    sentence = " ".join(method_card(name).split()).partition("Attackers: ")[2]
    assert "forged model" in sentence or "forged upload" in sentence


def test_unequal_steps_scale_a_forged_model_as_fednova_does() -> None:
    """Eq. 8: x + tau_eff sum p_i (w_i - x)/tau_i, so that one model counts by tau_eff/tau_i."""
    fed = QuantitySkew(clients=CLIENTS, alpha=2.0, min_size=21)(load("digits"), seed=1)
    with seen() as sent:
        result = run(
            FedNova(), FORGERIES["gaussian"](fraction=1 / CLIENTS), fed, local=FROZEN, client_weights="samples"
        )
    job, ((attacker, model),) = result.job, sent[0].models.items()
    tau, x = job.work(1, job.everyone).steps.double()[:, 0], start_of(result, fed)
    assert len(tau.unique()) > 2
    p = job.alpha[:, 0].double()
    wanted = float((p @ tau) * p[attacker] / tau[attacker] * (model - x).norm())
    assert float((held(result) - x).norm()) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("name", ["fednova", "q-ffl", "afl", "scaffold", "feddyn", "fiaelt", "fedavg"])
def test_virtual_time_changes_no_attack(name: str) -> None:
    """Nothing is late and every client is awaited: the round is that of a run without a clock."""
    attack = FORGERIES["sign-flip"](fraction=1 / CLIENTS)
    plain = held(run(name, attack, rounds=2))
    for schedule in ({"kind": "deadline", "seconds": 1e9}, {"kind": "buffered", "buffer": CLIENTS}):
        timed = run(name, attack, rounds=2, schedule=schedule, devices="equal")
        torch.testing.assert_close(held(timed), plain, rtol=1e-5, atol=1e-6)
