"""How far one site can move the model: bounds of every field, and ranges of what a site does not choose."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message

from fedloom.algorithms import PRESETS, REGISTRY
from fedloom.algorithms._base import Delta, Mean
from fedloom.algorithms._messages import Model, primary_field, upload_fields, upload_type
from fedloom.algorithms._prototypes import shape_of, update_means
from fedloom.algorithms.qffl import Up
from fedloom.choose.mixers import MIXERS
from fedloom.choose.weighers import WEIGHERS
from fedloom.data.input_spec import comparable_facts
from fedloom.engine.setup import make_job
from fedloom.errors import Stop
from fedloom.lab.experiment import parse
from fedloom.local.smoothness import largest
from fedloom.rows import masks
from fedloom.rows.algebra import lifted
from fedloom_sites.deploy.ops.plan import _propose_norm_bound, plan_deployment
from fedloom_sites.deploy.protocol.checks import ReplyChecks
from fedloom_sites.deploy.protocol.lengths import clip_upload, upload_norms
from fedloom_sites.deploy.protocol.rejected import RejectedReply
from fedloom_sites.deploy.setting_files import read_server
from tests.deploy.scene import FIRST, Scene, changed, document, scene
from tests.deploy.sessions import arrays_of, kind_of

pytestmark = pytest.mark.attack("uploads within bounds")

BAD = 1
SMALL: dict[str, Any] = {
    "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5, "max_train_per_client": 24},
    "evaluate": {"every": 100},
    "client_weights": "uniform",
    "rounds": 2,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def forging(here: Scene, change: Callable[[Any, Any], Any], rounds: Any = range(99)) -> Any:
    """A fault: one site's uploads are others, from what it received and would have sent."""
    forms = here.clients()[BAD].trainer.forms

    def fault(node: int, message: Message, reply: Message) -> Message:
        t = int(message.content["head"]["round"])  # type: ignore[arg-type]
        if node != FIRST + BAD or kind_of(message) != "train" or t not in rounds or not arrays_of(reply):
            return reply
        down, up = forms.read_down(arrays_of(message)[0]), forms.read_up(arrays_of(reply)[0]).up
        return changed(reply, BAD, arrays=[forms._messages.up(change(down, up), {}).encode()])

    return fault


def given(name: str) -> dict[str, Any]:
    options = {"algorithm": name, **({"layers": ["head.bias"]} if name == "fedbn" else {})}
    return options | ({"clusters": 2} if name in PRESETS and "clusters" in REGISTRY[name].options else {})


@pytest.mark.parametrize("name", [n for n in REGISTRY if n != "centralized"])
def test_no_honest_site_is_refused_by_bounds_and_ranges(name: str, tmp_path: Path) -> None:
    """With the bounds that `init` writes down, over rounds in which all that a method keeps has come to be."""
    here = scene(tmp_path, given(name), **SMALL | {"rounds": 3})
    experiment = here.experiment
    fed = experiment.partition(experiment.source.load(), 0)
    bound = _propose_norm_bound(*make_job(experiment.methods[0].setting, fed))
    if name == "fedadmm-inexact":  # in round 2 its u, with the dual in it, is 16 times as far as in round 1
        bound = 4 * bound  # type: ignore[operator]
    trains = name != "fedbabu"  # it trains no heads, and this model is a head
    assert here.serve(norm_bound=bound) is (Stop.DONE if trains else Stop.UNCHANGED)
    assert not here.audit("rejected")


def test_every_field_has_a_bound_of_its_own(tmp_path: Path) -> None:
    here = scene(tmp_path, "scaffold", **SMALL)
    experiment = here.experiment
    bound = _propose_norm_bound(
        *make_job(experiment.methods[0].setting, experiment.partition(experiment.source.load(), 0))
    )
    assert isinstance(bound, dict)
    assert bound.keys() == {"dy", "dc"}
    here = here._replace(server=here.server.with_(norm_bound=bound, quorum=2))
    for name in bound:
        grid = here.grid(forging(here, lambda _, up, name=name: scaled(up, name, bound[name] * 1.01), [1]))
        assert here.serve(grid) is Stop.DONE
        reasons = [x["reason"] for x in here.audit("rejected", step=11)]
        assert any(f"the difference in {name} is" in reason for reason in reasons)
        here = scene(tmp_path / name, "scaffold", **SMALL)
        here = here._replace(server=here.server.with_(norm_bound=bound, quorum=2))


def test_a_round_in_which_every_upload_is_rejected_names_what_to_do_before_the_next_start(tmp_path: Path) -> None:
    """The same command alone would be told the same by every site, for ever."""
    here = scene(tmp_path, "fedavg", **SMALL)
    assert here.serve(norm_bound=1e-9) is Stop.TOO_FEW
    detail = here.summary()["detail"]
    assert "only 0 of 3 sites sent a usable answer, but the quorum is 3" in detail
    assert "Rejected answers: 3. Fix the causes, which are in the audit log, then run the command again" in detail
    assert here.serve() is Stop.DONE


def scaled(up: Any, name: str, length: float) -> Any:
    value = getattr(up, name)
    return up._replace(**{name: value / value.norm() * length})


FORGED: dict[str, tuple[str, str, list[float]]] = {
    "fednova": ("fednova", "size", [-1.0, 0.0, 30.0, 1e6, 1e30]),
    "fednova with momentum": ("fednova", "size", [0.0, 1e3]),
    "afl": ("afl", "share", [-2.0, 0.0, 3.0, 1e9]),
    "afl's losses": ("afl", "loss", [-1.0, -1e30]),
    "fedskip": ("fedskip", "seen", [0.0, 1e8]),
    "q-ffl": ("q-ffl", "h", [0.0, -1.0, -1e9, 1e-9]),
    "q-ffl with q = 0": ("q-ffl", "h", [0.0, 0.5, 2.0, 1e9]),
    "fedmid": ("fedmid", "time", [-1.0, 1e6]),
    "feddualavg": ("feddualavg", "time", [-1.0, 1e6]),
    "fedadmm-inexact": ("fedadmm-inexact", "curvature", [1.1, -1.1, 1e30]),
    "fedproto": ("fedproto", "share", [-0.1, 1e-6, 1.1]),
    "fedpac": ("fedpac", "share", [-1e30, 1e-30]),
}
CASES = [(case, value) for case, (_, _, values) in FORGED.items() for value in values]
OPTIONS: dict[str, dict[str, Any]] = {
    "fednova with momentum": {"local": {"lr": 0.05, "epochs": 2, "batch_size": 7, "momentum": 0.9}},
}


@pytest.mark.parametrize(("case", "value"), CASES)
def test_a_number_that_a_site_does_not_choose_is_refused(case: str, value: float, tmp_path: Path) -> None:
    name, field, _ = FORGED[case]
    method = {"algorithm": name, **({"q": 0.0} if "q = 0" in case else {})}
    hidden = {"model": {"kind": "mlp", "hidden": [4]}} if field == "share" and name != "afl" else {}
    here = scene(tmp_path, method, **SMALL | hidden | OPTIONS.get(case, {}))
    here = here._replace(server=here.server.with_(quorum=2))

    def forge(_: Any, up: Any) -> Any:
        return up._replace(**{field: torch.full_like(getattr(up, field), value)})

    assert here.serve(here.grid(forging(here, forge, [1]))) is Stop.DONE
    [rejected] = here.audit("rejected", step=11)
    assert rejected["client"] == BAD
    assert f"{field} is {value:.4g}, but must be" in rejected["reason"]


B = 0.5


def moved(
    tmp_path: Path, method: dict[str, Any], forge: Callable[[float], Callable[[Any, Any], Any]], bound: float = B
) -> Any:
    """The models after one round in which one site sends either of two uploads, as far apart as they may be."""
    models = []
    for sign in (1.0, -1.0):
        here = scene(tmp_path / f"{sign}", method, **SMALL | {"rounds": 1})
        primary = primary_field(type(here.experiment.methods[0].setting.method))
        assert here.serve(here.grid(forging(here, forge(sign))), norm_bound={primary: bound}) is Stop.DONE
        assert not here.audit("rejected")
        models.append(here.model())
    return here, float((models[0] - models[1]).norm())


def along(d: torch.Tensor, sign: float) -> torch.Tensor:
    direction = torch.randn(d.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (sign * B * (1 - 1e-12) * direction / direction.norm()).to(d)


MOVED = (
    dict.fromkeys(("fedavg", "fedprox", "ditto", "pfedme", "gifair-fl", "afl", "scaffold", "fednova"), 1.0)
    | {
        "feddyn": 2.0,  # adds the mean, and to its sum of all rounds
        "fedslr": 2.0,  # the same, before the prox
        "fiaelt": 1.0,
        "fedadmm": 1.0,
        "fedadmm-inexact": 1.0,
        "dbe": 1.0,
        "fedala": 1.0,
    }
    | dict.fromkeys(("flame", "feddr", "fedpd", "fedsplit", "fedadmm-composite"), 1.0)
)
ABSOLUTE = ("fedadmm-inexact", "flame", "feddr", "fedpd", "fedsplit", "fedadmm-composite")
"""Methods whose upload is no difference to the received model."""


@pytest.mark.parametrize("name", MOVED)
def test_one_of_m_sites_moves_a_mean_by_twice_the_bound_over_m(name: str, tmp_path: Path) -> None:
    """And by no less, so the statement is sharp; FedNova multiplies by its mean number of steps."""
    method = given(name) | ({"lam": 1e-9} if name == "fedslr" else {})

    def forge(sign: float) -> Callable[[Any, Any], Any]:
        def change(down: Any, up: Any) -> Any:
            start = down[0].reshape(up[0].shape) if name in ABSOLUTE else 0
            return up._replace(**{up._fields[0]: start + along(up[0], sign)})

        return change

    far = 100.0 if name in ABSOLUTE else B  # of honest sites
    here, distance = moved(tmp_path, method, forge, far)
    steps = MOVED[name]
    if name == "fednova":
        [reply] = [float(c._memory.read(1).reply["work"][2]) for c in here.clients()[:1]]  # type: ignore[union-attr]
        steps = reply
    assert distance <= steps * 2 * B / 3 * (1 + 1e-9)
    assert distance >= steps * 2 * B / 3 * (1 - 1e-6)


def test_one_site_moves_fedskip_by_twice_the_bound_times_its_samples(tmp_path: Path) -> None:
    def forge(sign: float) -> Callable[[Any, Any], Any]:
        return lambda down, up: up._replace(w=down.w.reshape(up.w.shape) + along(up.w, sign))

    here, distance = moved(tmp_path, {"algorithm": "fedskip", "skip": 1}, forge)
    sizes = torch.tensor([c.trainer.job.fed.sizes("train")[c.site.client] for c in here.clients()]).double()
    part = float(sizes[BAD] / sizes.sum())
    assert distance <= 2 * B * part * (1 + 1e-9)
    assert distance >= 2 * B * part * (1 - 1e-6)


@pytest.mark.parametrize("q", [0.0, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("length", [1e-6, 0.1, 1.0, 30.0])
def test_one_client_moves_q_ffl_by_its_own_part_and_the_step_of_the_others(q: float, length: float) -> None:
    """Away from D / H of the others by at most |dw| / (H + h) + |D| / H, and h is not below its range."""
    draws = torch.Generator().manual_seed(1)
    method = REGISTRY["q-ffl"](q=q, lipschitz=2.0)
    change = torch.randn(4, 7, generator=draws, dtype=torch.float64)
    loss = torch.rand(4, 1, generator=draws, dtype=torch.float64) + 0.1
    square = (change * change).sum(1, keepdim=True)
    honest = Up(loss**q * change, q * loss ** (q - 1) * 2.0 * square + loss**q)
    work: Any = SimpleNamespace(lr=0.1)
    low, high = method.ranges(None, honest, work)["h"]
    assert bool((honest.h >= torch.as_tensor(low) * (1 - 1e-12)).all())
    assert bool((honest.h <= torch.as_tensor(high) * (1 + 1e-12)).all())
    d, h = honest.dw.sum(0), float(honest.h.sum())
    direction = torch.randn(1, 7, generator=draws, dtype=torch.float64)
    forged = Up(length * direction / direction.norm(), torch.zeros(1, 1))
    smallest = float(method.ranges(None, forged, work)["h"][0])
    for own in (smallest, 10 * smallest, 1e12) if q else (1.0,):
        up = Up((d + forged.dw[0]) / 5, torch.tensor([(h + own) / 5]))
        x = method.server(Model(torch.zeros(7, dtype=torch.float64)), up, None).x  # type: ignore[arg-type]
        assert float((x - d / h).norm()) <= length / (h + own) + float(d.norm()) / h + 1e-12


def test_one_site_moves_fiaelt_by_both_of_its_fields(tmp_path: Path) -> None:
    """2 w (B + B' / beta), B the bound of dx and B' that of dz; and by no less."""

    def forge(sign: float) -> Callable[[Any, Any], Any]:
        return lambda _, up: up._replace(dx=along(up.dx, sign), dz=along(up.dz, sign))

    _, distance = moved(tmp_path, {"algorithm": "fiaelt", "beta": 4.0, "smooth": 0.8}, forge)
    most = 2 / 3 * (B + B / 4.0)
    assert most * (1 - 1e-6) <= distance <= most * (1 + 1e-9)


def test_one_site_s_smoothness_is_that_of_the_others_times_100_at_most() -> None:
    """So no claim makes FIAELT's penalty infinite; where more than half measure 0, nothing is cut."""
    claims = torch.tensor([[2.0], [3.0], [1.0], [3e38]])
    assert largest(claims, "smooth").tolist() == [200.0]
    assert largest(claims[:3], "smooth").tolist() == [3.0]
    assert largest(torch.tensor([[0.0], [0.0], [5.0]]), "smooth").tolist() == [5.0]


@pytest.mark.parametrize("bad", [-1.0, -100.0])
def test_no_covariance_of_one_site_makes_pfedfda_singular(bad: float) -> None:
    """The mean is lifted to the nearest one above min(ridge, 1)/2, which moves no further than the mean does."""
    draws = torch.Generator().manual_seed(3)
    root = torch.randn(5, 5, generator=draws, dtype=torch.float64)
    honest = (root @ root.T + torch.eye(5)).flatten()
    assert lifted(honest, 0.5) is honest
    forged = honest + bad * honest + torch.randn(25, generator=draws, dtype=torch.float64)
    square = lifted(forged, 0.5).view(5, 5)
    assert float(torch.linalg.eigvalsh(square).min()) >= 0.5 - 1e-9
    other = forged + 0.1 * torch.randn(25, generator=draws, dtype=torch.float64)
    distance = float((lifted(other, 0.5) - lifted(forged, 0.5)).norm())
    assert distance <= float((other - forged).norm()) * (1 + 1e-9)


@pytest.mark.parametrize(("name", "part"), [("fedas", 1.0), ("ifca", 1 / 3), ("cfl", 1 / 3)])
def test_one_site_moves_a_mean_of_rows_by_its_part(name: str, part: float) -> None:
    """FedAS: all of it, as a site's Fisher mass is its weight; IFCA and CFL: the site's part of its cluster."""
    model = {"kind": "mlp", "hidden": [4]}
    experiment = parse(document(given(name), **SMALL | {"model": model}))
    job, server = make_job(experiment.methods[0].setting, experiment.partition(experiment.source.load(), 0))
    ctx, models = job.ctx(1, torch.arange(3)), []
    draws = torch.Generator().manual_seed(5)
    honest = 0.1 * torch.randn(3, job.oracle.layout.d, generator=draws, dtype=torch.float64)
    for sign in (1.0, -1.0):
        rows = honest.clone()
        move = (
            along(rows[BAD], sign)
            if name != "fedas"
            else along(rows[BAD], sign) * job.algorithm.part("body", ctx.layout)
        )
        rows[BAD] = server[0] + move if name == "ifca" else move
        number = torch.zeros(3, 1, dtype=torch.float64)
        number[BAD] = 1e30 if name == "fedas" else 0.0
        up = upload_type(type(job.algorithm))
        models.append(
            job.algorithm.server(server, up(*(rows, number)[: len(up._fields)]), ctx)[0].reshape(-1, honest.shape[1])[0]
        )
    distance = float((models[0] - models[1]).norm())
    body = float(move.norm()) / B if name == "fedas" else 1.0
    assert 2 * B * part * body * (1 - 1e-6) <= distance <= 2 * B * part * (1 + 1e-9)


@pytest.mark.parametrize("kind", MIXERS)
def test_a_mixture_is_a_mean_of_the_sites_models(kind: str) -> None:
    """Whatever one site sends, another's download is within the hull of all models."""
    experiment = parse(document({"algorithm": "fedavg"}, **SMALL))
    job, _ = make_job(experiment.methods[0].setting, experiment.partition(experiment.source.load(), 0))
    ctx, draws = job.ctx(1, torch.arange(3)), torch.Generator().manual_seed(6)
    for scale in (1e-6, 1.0, 1e6):
        models = torch.randn(3, 8, generator=draws, dtype=torch.float64)
        models[BAD] *= scale
        weights = MIXERS[kind]().weights(models, torch.zeros(8, dtype=torch.float64), ctx)
        assert bool((weights >= -1e-12).all())
        assert torch.allclose(weights.sum(1), torch.ones(3, dtype=torch.float64))


def test_one_site_moves_a_prototype_by_its_total_over_the_others_share() -> None:
    """2 w B / S and the others' prototype times w / (S + w), S the others' part of the class in the mean of shares."""
    draws = torch.Generator().manual_seed(4)
    for _ in range(50):
        weight, mass = (float(torch.rand(1, generator=draws)) + 0.01 for _ in range(2))
        prototype = torch.randn(1, 7, generator=draws, dtype=torch.float64)
        ends = []
        for _ in range(2):
            change = torch.randn(1, 7, generator=draws, dtype=torch.float64)
            change = B * change / change.norm()
            share = torch.rand(1, generator=draws, dtype=torch.float64)
            total, there = (mass * prototype + weight * change).flatten(), mass + weight * share
            ends.append(update_means(torch.zeros(7), torch.zeros(1), total, there)[0].double())
        most = 2 * weight * B / mass + float(prototype.norm()) * weight / (mass + weight)
        assert float((ends[0] - ends[1]).norm()) <= most * (1 + 1e-6)


HIDDEN: dict[str, Any] = {"model": {"kind": "mlp", "hidden": [4]}}


def server_states(name: str, forge: Callable[[Any, float], Any], seed: int) -> tuple[Any, Any]:
    """What the server has after either of two uploads of one site; the others send the same."""
    experiment = parse(document(given(name), **SMALL | HIDDEN))
    job, server = make_job(experiment.methods[0].setting, experiment.partition(experiment.source.load(), 0))
    layout, draws = job.oracle.layout, torch.Generator().manual_seed(seed)
    (classes, k), top = shape_of(layout), masks.head(layout)
    lengths = {"head": int(top.sum()), "spread": 1, "share": classes, "cov": k * k, "dw": layout.d}
    kinds, rows = upload_fields(type(job.algorithm)), {}
    for field in kinds:
        rows[field] = torch.rand(3, lengths.get(field, classes * k), generator=draws, dtype=torch.float64)
    rows["dw"] *= ~top
    states = []
    for sign in (1.0, -1.0):
        sent = forge({n: v.clone() for n, v in rows.items()}, sign)
        means = {n: v.mean(0) if isinstance(kinds[n], Mean) else v for n, v in sent.items()}
        up = upload_type(type(job.algorithm))(**means)
        states.append(job.algorithm.server(server, up, job.ctx(1, torch.arange(3))))
    return states[0], states[1]


@pytest.mark.parametrize(("field", "state"), [("dw", "x"), ("means", "means"), ("cov", "cov")])
def test_one_site_moves_each_field_of_pfedfda_by_its_part(field: str, state: str) -> None:
    """2 B w of each, and by no less where the covariance stays above what it is lifted to."""

    def forge(rows: dict[str, torch.Tensor], sign: float) -> dict[str, torch.Tensor]:
        move = rows[field][BAD] if field != "cov" else torch.eye(4, dtype=torch.float64).flatten()
        rows["cov"] = 10 * torch.eye(4, dtype=torch.float64).flatten().repeat(3, 1)
        rows[field][BAD] = sign * B * (1 - 1e-12) * move / move.norm()
        return rows

    one, other = server_states("pfedfda", forge, 8)
    distance = float((getattr(one, state) - getattr(other, state)).norm())
    assert 2 * B / 3 * (1 - 1e-6) <= distance <= 2 * B / 3 * (1 + 1e-6)


@pytest.mark.parametrize("spread", [0.0, 1e30])
@pytest.mark.parametrize("moment", [0.0, 1e6])
def test_fedpac_s_heads_are_means_of_the_sites_heads(spread: float, moment: float) -> None:
    """Whatever a site claims of its spread and its moment: weights in the simplex, so no head is longer than B."""

    def forge(rows: dict[str, torch.Tensor], sign: float) -> dict[str, torch.Tensor]:
        rows["head"] = B * rows["head"] / rows["head"].norm(dim=1, keepdim=True)
        rows["head"][BAD] = along(rows["head"][BAD], sign)
        rows["spread"][BAD], rows["moment"][BAD] = spread, along(rows["moment"][BAD], sign) * moment
        return rows

    for after in server_states("fedpac", forge, 9):
        assert float(after.heads.norm(dim=1).max()) <= B * (1 + 1e-6)


@pytest.mark.parametrize("answer", [-1e300, -1.0, 0.0, 1.0, 1e300])
@pytest.mark.parametrize(
    "weigher",
    [
        {"kind": "fairfed"},
        {"kind": "fairfed", "metric": "loss"},
        {"kind": "equitable"},
        {"kind": "equitable", "clusters": 2},
    ],
    ids=str,
)
def test_one_site_s_answer_moves_a_weighted_mean_by_twice_the_bound(weigher: Any, answer: float) -> None:
    """Weights are from 0 to 1 and sum to 1, in every later round too; so two means are 2 B apart at most."""
    made = WEIGHERS[weigher["kind"]].model_validate({k: v for k, v in weigher.items() if k != "kind"})
    experiment = parse(document({"algorithm": "fedavg"}, **SMALL))
    job, _ = make_job(experiment.methods[0].setting, experiment.partition(experiment.source.load(), 0))
    draws, state = torch.Generator().manual_seed(10), made.init(job.ctx(1, torch.arange(3)))
    for t in (1, 2):
        ctx = job.ctx(t, torch.arange(3))
        info = torch.rand(3, 1 if weigher["kind"] == "fairfed" else 5, generator=draws, dtype=torch.float64)
        if t == 1:
            info[BAD] = answer
        weights, state = made.apply(state, info, ctx)
        part = weights / weights.sum()
        assert bool(((part >= 0) & (part <= 1)).all()), (t, weights)
        ends = [along(torch.zeros(9, dtype=torch.float64) + 1, sign) for sign in (1.0, -1.0)]
        assert float((ends[0] - ends[1]).norm() * part[BAD]) <= 2 * B * (1 + 1e-9)
    if weigher == {"kind": "fairfed"}:  # an accuracy is 1 at most, so the answer decides no later round
        assert float(state.omega.max()) <= 2


@pytest.mark.parametrize("optimiser", ["momentum", "adagrad", "adam"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_one_site_moves_fedopt_by_its_part_of_a_step(optimiser: str, scale: float) -> None:
    """Of two means that differ by 2 B w, from any state that rounds can lead to."""
    draws = torch.Generator().manual_seed(2)
    method = REGISTRY["fedopt"](optimiser=optimiser, server_lr=0.3)
    beta1 = {"momentum": 0.9, "adagrad": 0.0, "adam": 0.9}[optimiser]
    server, _, _ = method.init(torch.zeros(9, dtype=torch.float64), None)  # type: ignore[arg-type]
    for _ in range(6):
        change = scale * torch.randn(9, generator=draws, dtype=torch.float64) * torch.rand(9, generator=draws)
        both = [method.server(server, Delta(change + along(change, sign)), None) for sign in (1.0, -1.0)]  # type: ignore[arg-type]
        distance = float((both[0].x - both[1].x).norm())
        most = {
            "momentum": 2 * B,
            "adagrad": B / method.tau,  # v is never below tau^2
            "adam": ((1 - beta1) * 2 * B + beta1 * float(server.m.norm())) / method.tau,
        }[optimiser]
        assert distance <= 0.3 * most * (1 + 1e-9)
        server = both[0]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("near", [1e-9, 1.0, 30.0])
def test_one_site_moves_yogi_by_its_part_of_a_step_and_the_jumps_of_its_moment(scale: float, near: float) -> None:
    """Where a mean passes the square root of v, Yogi's step jumps: in each number by up to the constant below.

    The mean is put next to all of these places at once, which is the worst that can be.
    """
    draws = torch.Generator().manual_seed(2)
    method = REGISTRY["fedopt"](optimiser="yogi", server_lr=0.3)
    beta2, d, jumps = method.beta2, 9, list[float]()
    jump = 0.1 * (beta2**-0.5 - (2 - beta2) ** -0.5)
    server, _, _ = method.init(torch.zeros(d, dtype=torch.float64), None)  # type: ignore[arg-type]
    for _ in range(12):
        sides = torch.randint(0, 2, (d,), generator=draws).double() * 2 - 1
        place, move = server.v.sqrt() * sides, near * B * sides / d**0.5
        both = [method.server(server, Delta(place + sign * move), None) for sign in (1.0, -1.0)]  # type: ignore[arg-type]
        distance = float((both[0].x - both[1].x).norm())
        step = (0.1 / beta2 * 2 * float(move.norm()) + 0.9 * float(server.m.norm())) / method.tau
        assert distance <= 0.3 * (step + jump * d**0.5) * (1 + 1e-9)
        still = server._replace(m=torch.zeros(d, dtype=torch.float64))
        pair = [method.server(still, Delta(place + sign * move), None).x for sign in (1.0, -1.0)]  # type: ignore[arg-type]
        jumps.append(float((pair[0] - pair[1]).norm()) / (0.3 * jump * d**0.5))
        grown = scale * torch.randn(d, generator=draws, dtype=torch.float64)
        server = method.server(server, Delta(grown), None)  # type: ignore[arg-type]
    if near == 1e-9 and scale == 100.0:  # the jumps alone, and all of them
        assert jumps[-1] >= 0.99


def test_one_site_moves_a_mean_by_samples_by_its_claim(tmp_path: Path) -> None:
    """2 B N / (N + S): N the limit of what a site may claim, S what the others have; and by no less."""
    models, most = [], 500
    for sign in (1.0, -1.0):
        here = scene(tmp_path / f"{sign}", "fedavg", **SMALL | {"rounds": 1, "client_weights": "samples"})
        forge = forging(here, lambda _, up, sign=sign: up._replace(dw=along(up.dw, sign)))

        def fault(node: int, message: Message, reply: Message, forge: Any = forge) -> Message:
            if node == FIRST + BAD and kind_of(message) == "hello":
                return changed(reply, BAD, head={"sizes": [most, 0, 0]})
            sent = forge(node, message, reply)
            return changed(sent, BAD, head={"samples": most}) if node == FIRST + BAD else sent

        assert here.serve(here.grid(fault), norm_bound=B, examples_limit=most) is Stop.DONE
        assert not here.audit("rejected")
        models.append(here.model())
        others = sum(c.trainer.job.fed.sizes("train")[c.site.client] for c in here.clients() if c.site.client != BAD)
    part = most / (most + float(others))
    distance = float((models[0] - models[1]).norm())
    assert 2 * B * part * (1 - 1e-6) <= distance <= 2 * B * part * (1 + 1e-9)


def test_with_data_of_their_own_the_most_samples_are_said(experiment: Any) -> None:
    assert plan_deployment(experiment(), 3, own_data=True).most_samples is None
    assert plan_deployment(experiment(), 3, own_data=True).by_samples
    assert plan_deployment(experiment(), 3, own_data=True, most_samples=700).most_samples == 700
    assert not plan_deployment(experiment(client_weights="uniform"), 3, own_data=True).by_samples


def test_a_site_claims_no_more_samples_than_the_agreed_parts_have(written: Path, planned: Any) -> None:
    """`init` has cut the data, so it knows the largest part of any site; a larger one is refused at the start."""
    server = read_server(written / "server" / "server.toml")
    assert server.examples_limit == planned.most_samples < 10_000
    head = {"sizes": [server.examples_limit + 1, 0, 0], "figures": "", **comparable_facts(server.samples)}
    with pytest.raises(RejectedReply, match="the sample counts must be three numbers from 0 to"):
        ReplyChecks(server, {}).check_data(head)
    ReplyChecks(server, {}).check_data(head | {"sizes": [server.examples_limit, 0, 0]})
    greeting, other = (ReplyChecks(server, {}).longest(kind) for kind in ("hello", "score"))
    assert greeting - other >= len(json.dumps(server.samples.model_dump_json()))  # beside the head, JSON in JSON


@pytest.mark.parametrize("name", ["fedavg", "flame", "scaffold", "fedproto"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e160])
def test_an_upload_is_projected_onto_every_bound(name: str, scale: float, tmp_path: Path) -> None:
    """A site under masks shortens each field's difference to the bound, and the field itself to `engine.norm_bound`."""
    here = scene(tmp_path, name, **SMALL)
    client = here.clients()[0].trainer
    job, server = client.job, client.node.server
    down = job.down(server, 1, client.ids)
    draws = torch.Generator().manual_seed(0)
    up = type(client.forms.idle)(
        *(scale * torch.randn(f.shape, generator=draws, dtype=f.dtype) for f in client.forms.idle)
    )
    before = upload_norms(job, up, down)
    after, is_cut = clip_upload(job, up, down, dict.fromkeys(job.fields, 0.5))
    assert is_cut == any(float(norm) > 0.5 for norm in before.values())
    for field, norm in upload_norms(job, after, down).items():
        assert float(norm) == pytest.approx(min(0.5, float(before[field])), rel=1e-6)
    engine = job.setting.engine.with_(norm_bound=0.25)
    within, is_cut = clip_upload(replace(job, setting=job.setting.with_(engine=engine)), up, down, {})
    assert is_cut == any(float((f / scale).norm()) > 0.25 / scale for f in up)
    for field, old in zip(within, up, strict=True):
        assert float(field.norm()) <= 0.25 * (1 + 1e-6)
        assert torch.allclose(field / field.norm(), (old / scale) / (old / scale).norm(), atol=1e-6)
