"""The laws can fail: methods with one mistake each, and the law that finds it."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from typing import Annotated, Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedloom.algorithms import (
    FLAME,
    SCAFFOLD,
    Algorithm,
    Delta,
    FedACS,
    FedAvg,
    FedBN,
    FedNova,
    Kept,
    Mean,
    Model,
    Point,
)
from fedloom.algorithms.ditto import Ditto
from fedloom.algorithms.scaffold import Up as Variates
from fedloom.errors import ConfigError
from fedloom.local import Ctx, Nothing, Work, descend
from fedloom.rows.layout import Layout
from fedloom.seeds import generator
from fedloom.testing import METHOD_LAWS, check_algorithm, check_law
from fedloom.testing.laws import LAW_HINTS
from fedloom.testing.network import Classifier


class TwoPrimaries(NamedTuple):
    dw: Annotated[Tensor, Mean(base="down.x", primary=True)]
    w: Annotated[Tensor, Mean(primary=True)]


class Baseless(NamedTuple):
    dw: Annotated[Tensor, Mean(base="down.y", primary=True)]


class Absolute(NamedTuple):
    w: Annotated[Tensor, Mean(primary=True)]


class Part(NamedTuple):
    dw: Annotated[Tensor, Mean(base="down.x", primary=True, part="body")]


class Crashes(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(super().client(down, rows, work)[0].dw.view(2, 2)), rows


class CrashesAtTheServer(FedAvg):
    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        assert len(up.dw) == 1, "an assertion of the method is no sentence of a law"
        return server


class CrashesInTheDownload(FedAvg):
    def down(self, server: Model, kept: None, ctx: Ctx) -> Model:
        return Model({}["x"])


class SoftmaxHead(FedAvg):
    """Reads a head with an output per class, as the models of a task with classes have it."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        up, rows = super().client(down, rows, work)
        head = work.layout.tree(down.x.expand_as(up.dw))["head.weight"]
        assert (work.class_means(down.x) * head).shape == head.shape
        assert work.class_counts.shape == head.shape[:2]
        return up, rows


class TwoPrimary(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[TwoPrimaries, Nothing]:
        up, rows = super().client(down, rows, work)
        return TwoPrimaries(up.dw, up.dw + down.x), rows


class UnknownBase(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Baseless, Nothing]:
        return Baseless(super().client(down, rows, work)[0].dw), rows


class NoTemplate(FLAME):
    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Any, Any, Any]:
        return *super().init(x0, ctx)[:2], None


class NotPerClient(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(super().client(down, rows, work)[0].dw.mean(0)), rows


class NoModel(FedAvg):
    def global_model(self, server: Model) -> Any:
        return None


class LooksAtNeighbours(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        dw = super().client(down, rows, work)[0].dw
        return Delta(dw - 1e-3 * (dw - dw.mean(0))), rows


class CohortAlone(FedAvg):
    """Right within a cohort, wrong for a client by itself."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        dw = super().client(down, rows, work)[0].dw
        return Delta(dw if work.m > 1 else 0.9 * dw), rows


class FirstIsSpecial(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        dw = super().client(down, rows, work)[0].dw
        return Delta(torch.cat([0.5 * dw[:1], dw[1:]])), rows


class FirstRowCounts(FedACS):
    def down(self, server: Nothing, kept: Any, ctx: Ctx) -> Any:
        return type(super().down(server, kept, ctx))(kept.w[:1].expand_as(kept.w))


class InPlaceServer(FedAvg):
    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x.add_(up.dw))


class InPlaceRows(SCAFFOLD):
    def client(self, down: Any, rows: Any, work: Work) -> tuple[Variates, Any]:
        up, new = super().client(down, rows, work)
        rows.ci.copy_(new.ci)
        return up, new


class Written(NamedTuple):
    v: Tensor


class WritesTheSameTwice(FedAvg):
    """What is written into the rows does not depend on them, so that a second call changes nothing."""

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Model, Written, None]:
        return Model(x0), Written(x0), None

    def client(self, down: Model, rows: Any, work: Work) -> tuple[Delta, Written]:
        w = descend(down.x, work)
        rows.v.copy_(w)
        return Delta(w - down.x), rows


class ChangesWork(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        answer = super().client(down, rows, work)
        work.lr = 0.5 * work.lr
        return answer


class Remembers(FedAvg):
    calls: ClassVar[list[int]] = []

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        self.calls.append(1)
        return Delta(super().client(down, rows, work)[0].dw / len(self.calls)), rows


class ChangesItself(FedAvg):
    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        object.__setattr__(self, "server_lr", 0.9 * self.server_lr)
        return super().server(server, up, ctx)


class GlobalNoise(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        dw = super().client(down, rows, work)[0].dw
        return Delta(dw + 1e-3 * torch.randn_like(dw)), rows


class CountsTheSampled(FedAvg):
    def down(self, server: Model, kept: None, ctx: Ctx) -> Model:
        return Model(server.x / ctx.m)


class SumOfVariates(SCAFFOLD):
    def server(self, server: Any, up: Any, ctx: Ctx) -> Any:
        alone = torch.zeros_like(ctx.weight).index_copy(0, ctx.ids, ctx.weight[ctx.ids])
        return super().server(server, up, ctx._replace(weight=alone))


class OldMinusNew(SCAFFOLD):
    def client(self, down: Any, rows: Any, work: Work) -> tuple[Variates, Any]:
        up, new = super().client(down, rows, work)
        return up._replace(dc=-up.dc), new


class SendsOldMinusNew(FedAvg):
    """Its runs equal FedAvg's, but an attack on them goes backwards."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(-super().client(down, rows, work)[0].dw), rows

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x - up.dw)


class WeighsTwice(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(super().client(down, rows, work)[0].dw * work.weight), rows


class ReadsOutside(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Part, Nothing]:
        return Part(super().client(down, rows, work)[0].dw), rows

    def part(self, name: str, layout: Layout) -> Tensor:
        return layout.mask(name)


class FloatPart(ReadsOutside):
    def part(self, name: str, layout: Layout) -> Tensor:
        return layout.mask(name).double()


class PeeksAtKept(FLAME):
    def down(self, server: Any, kept: Any, ctx: Ctx) -> Any:
        x = super().down(server, kept, ctx)
        return x if kept is None else type(x)(kept.u.mean(0))


class DividesByZero(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(super().client(down, rows, work)[0].dw / work.steps), rows


class MovesWhenIdle(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(super().client(down, rows, work)[0].dw + 0.1), rows


class SaysDifference(FedAvg):
    """Sends the model, declares a difference."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(descend(down.x, work)), rows

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(up.dw)


class SaysAbsolute(FedAvg):
    """Sends a difference, declares the model."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Absolute, Nothing]:
        return Absolute(descend(down.x, work) - down.x), rows

    def server(self, server: Model, up: Any, ctx: Ctx) -> Model:
        return Model(server.x + up.w)


class KnowsTheOrigin(FedAvg):
    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(0.99 * server.x + up.dw)


class AlwaysDouble(FedAvg):
    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(super().client(down, rows, work)[0].dw.double()), rows


class RoundsTheSteps(FedAvg):
    """An integer tensor times a float is float32, whatever the model is."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        dw = super().client(down, rows, work)[0].dw
        return Delta(dw / (work.steps.clamp(min=1) * work.lr) * work.lr), rows


class ForgetsItsOptions(FedAvg):
    """An option that is set outside validation is lost with the checkpoint's experiment file."""

    def with_(self, **changes: Any) -> Any:
        return FedAvg(server_lr=0.5)


class EncodesNothing(FedNova):
    """Attackers send its normalised change as if it were the change, and no steps."""

    def encode(self, model: Tensor, down: Model, rows: Nothing, work: Work) -> None:
        return None


class DecodesAnotherModel(FedNova):
    def decode(self, down: Model, rows: Nothing, up: Any, work: Work) -> Tensor:
        return down.x + up.dw


class KeepsNoRows(FLAME):
    def client(self, down: Any, rows: Any, work: Work) -> tuple[Point, Any]:
        up, new = super().client(down, rows, work)
        return up, new._replace(pi=new.pi[:1])


BROKEN: list[tuple[str, type[Algorithm]]] = [
    ("runs", Crashes),
    ("runs", CrashesAtTheServer),
    ("runs", CrashesInTheDownload),
    ("declarations", TwoPrimary),
    ("declarations", UnknownBase),
    ("declarations", NoTemplate),
    ("declarations", FloatPart),
    ("declarations", WeighsTwice),
    ("shapes", NotPerClient),
    ("shapes", NoModel),
    ("shapes", KeepsNoRows),
    ("row_independence", LooksAtNeighbours),
    ("row_independence", CohortAlone),
    ("permutation", FirstIsSpecial),
    ("permutation", FirstRowCounts),
    ("arguments_unmodified", InPlaceServer),
    ("arguments_unmodified", InPlaceRows),
    ("arguments_unmodified", WritesTheSameTwice),
    ("arguments_unmodified", ChangesWork),
    ("no_state", Remembers),
    ("no_state", ChangesItself),
    ("no_state", GlobalNoise),
    ("dropped_is_not_sampled", CountsTheSampled),
    ("dropped_is_not_sampled", LooksAtNeighbours),
    ("bases", SumOfVariates),
    ("bases", OldMinusNew),
    ("bases", SendsOldMinusNew),
    ("parts", ReadsOutside),
    ("kept_rows", PeeksAtKept),
    ("idle_is_finite", DividesByZero),
    ("idle_is_zero", MovesWhenIdle),
    ("encoding", EncodesNothing),
    ("encoding", DecodesAnotherModel),
    ("translation", SaysDifference),
    ("translation", SaysAbsolute),
    ("translation", KnowsTheOrigin),
    ("precision", AlwaysDouble),
    ("precision", RoundsTheSteps),
    ("resume", ForgetsItsOptions),
]


@pytest.mark.parametrize(("law", "broken"), BROKEN, ids=[f"{law}-{broken.__name__}" for law, broken in BROKEN])
def test_law_finds_the_mistake(law: str, broken: type[Algorithm]) -> None:
    with pytest.raises(AssertionError, match=f"law {law}, {broken.__name__}"):
        check_law(law, broken())


@pytest.mark.parametrize(
    ("broken", "stage", "error"),
    [
        (Crashes, "client", "RuntimeError: shape .* is invalid"),
        (CrashesAtTheServer, "server", "AssertionError: an assertion of the method"),
        (CrashesInTheDownload, "down", "KeyError: 'x'"),
    ],
)
def test_a_crash_names_its_function_its_file_and_its_line(broken: type[Algorithm], stage: str, error: str) -> None:
    line = inspect.getsourcelines(broken)[1]
    with pytest.raises(AssertionError, match=rf"law runs, {broken.__name__}.*: {stage} stopped with {error}") as caught:
        check_algorithm(broken())
    place = re.search(r"\(test_broken.py, line (\d+)\); repair this line", str(caught.value))
    assert place
    assert line < int(place[1]) < line + 4
    assert "annotate" not in str(caught.value)


def test_a_head_per_class_is_checked_with_its_module() -> None:
    with pytest.raises(AssertionError, match=r"(?s)law runs, .*head.weight \[1, 2\].*pass layout=MODULE"):
        check_algorithm(SoftmaxHead())
    net = nn.Sequential(OrderedDict(body=nn.Linear(4, 5), tanh=nn.Tanh(), head=nn.Linear(5, 3)))
    check_algorithm(SoftmaxHead(), layout=net, shape=(4,))


def test_every_law_can_fail() -> None:
    assert {law for law, _ in BROKEN} == set(METHOD_LAWS)


def test_check_algorithm_runs_every_law_but_those_left_out() -> None:
    check_algorithm(FedAvg())
    with pytest.raises(
        AssertionError, match="law translation, KnowsTheOrigin.*the server's state depends on the origin"
    ):
        check_algorithm(KnowsTheOrigin())
    check_algorithm(KnowsTheOrigin(), without=["translation"])


class ComparesClasses(FedAvg):
    """Right on quadratics, whose classes have one mean; on a network it looks at its neighbours."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        dw = super().client(down, rows, work)[0].dw
        first, second = work.class_means(down.x.expand_as(dw))[:, :2].unbind(1)
        return Delta(dw + (first - second).mean()), rows


def test_a_network_finds_what_quadratics_do_not() -> None:
    for law in set(METHOD_LAWS) - {"translation"}:
        check_law(law, ComparesClasses())
    with pytest.raises(AssertionError, match="law row_independence on a network, ComparesClasses"):
        check_algorithm(ComparesClasses())


def normalised(seed: int) -> nn.Module:
    module = nn.Sequential(OrderedDict(conv=nn.Linear(2, 3), norm=nn.BatchNorm1d(3), fc=nn.Linear(3, 2)))
    draws = generator(seed)
    with torch.no_grad():
        for linear in (module.conv, module.fc):
            for parameter in linear.parameters():
                parameter.uniform_(-1, 1, generator=draws).div_(linear.in_features**0.5)
    return module


@pytest.mark.parametrize("seed", [775, 272, 45])  # float32 ends 4e-2, 1e-2 and 9e-4 from float64
def test_a_network_that_magnifies_rounding_keeps_the_law_of_precision(seed: int) -> None:
    network = Classifier.create(normalised(seed), (2,))
    check_law("precision", FedBN(layers=("norm",)), on=network)
    with pytest.raises(AssertionError, match=r"law precision on a network, RoundsTheSteps"):
        check_law("precision", RoundsTheSteps(), on=network)


def test_a_module_is_checked_with_samples_that_it_takes() -> None:
    module = normalised(0)
    check_algorithm(FedBN(layers=("norm",)), layout=module, shape=(2,))
    with pytest.raises(ConfigError, match=r"does not accept samples of shape \[5\].*Pass `shape`"):
        check_algorithm(FedAvg(), layout=module, shape=(5,))
    with pytest.raises(ConfigError, match=r"at least two classes, got \[24, 1\]"):
        check_algorithm(FedAvg(), layout=nn.Linear(2, 1), shape=(2,))
    with pytest.raises(ConfigError, match="Also pass layout=MODULE"):
        check_algorithm(FedAvg(), shape=(2,))


def test_kept_fields_all_or_none() -> None:
    class Mixed(NamedTuple):
        u: Annotated[Tensor, Kept(primary=True)]
        du: Annotated[Tensor, Mean(base="down.x")]

    class OneKept(FLAME):
        def client(self, down: Any, rows: Any, work: Work) -> tuple[Mixed, Any]:
            up, new = super().client(down, rows, work)
            return Mixed(up.u, up.u - down.x), new

    OneKept.client.__annotations__["return"] = tuple[Mixed, Any]
    with pytest.raises(AssertionError, match="if the primary field is Kept, all must be Kept"):
        check_law("declarations", OneKept())


def test_a_method_that_names_layers_is_checked_with_their_names() -> None:
    named = FedBN(layers=("norm",))
    with pytest.raises(AssertionError, match="no parameter starts with 'norm'"):
        check_algorithm(named)
    check_algorithm(
        named, layout=Layout.create_from_shapes({"conv.weight": (2, 2), "norm.weight": (2,), "fc.weight": (1, 2)})
    )
    module = nn.Sequential(OrderedDict(conv=nn.Linear(2, 2), norm=nn.BatchNorm1d(2), fc=nn.Linear(2, 1)))
    check_algorithm(named, layout=module)


def test_every_law_names_its_cure() -> None:
    assert LAW_HINTS.keys() == METHOD_LAWS.keys()
    with pytest.raises(AssertionError, match=r"law translation.*without=\['translation'\]"):
        check_algorithm(KnowsTheOrigin())


def _crash(self: object, *_: object) -> object:
    return torch.ones(2) @ torch.ones(3)


@pytest.mark.parametrize("stage", ["init", "down", "client", "server", "personal"])
def test_a_crash_names_the_stage_whatever_its_function_was_called(stage: str) -> None:
    """And file and line; it is no fault of the declarations."""
    crashing = type("Crashing", (Ditto,), {stage: _crash, "__module__": __name__})
    with pytest.raises(AssertionError, match=rf"law runs, .*: {stage} stopped with .*\(test_broken.py, line \d+\)"):
        check_algorithm(crashing())
