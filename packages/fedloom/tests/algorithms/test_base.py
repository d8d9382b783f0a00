"""What the algorithms share: fields read from annotations, bases, and helpers of composite methods."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import pytest
import torch
from method_rows import gradient_mapping
from pydantic import Field
from torch import Tensor

from fedloom.algorithms import (
    FLAME,
    SCAFFOLD,
    Algorithm,
    Delta,
    FedAvg,
    Kept,
    Mean,
    Model,
    Sent,
    encodings,
    primary_field,
    upload_fields,
    upload_type,
)
from fedloom.algorithms._messages import base_of, download_type
from fedloom.algorithms.scaffold import Client, Server, Up
from fedloom.choose import EquitableWeigher
from fedloom.errors import ConfigError
from fedloom.local import Ctx, LocalSGD, Nothing, Work, descend
from fedloom.rows.proxes import L1
from fedloom.testing import TOY_LAYOUT, Problem, federate
from fedloom.testing.federate import ReferenceFederation


def test_fields_of_an_upload_are_read_from_the_annotation() -> None:
    assert upload_type(SCAFFOLD) is Up
    assert dict(upload_fields(SCAFFOLD)) == {
        "dy": Mean(base="down.x", primary=True),
        "dc": Mean(base="rows.ci", accumulates=True),
    }
    assert dict(upload_fields(FLAME)) == {"u": Kept(primary=True)}
    assert (primary_field(SCAFFOLD), primary_field(FLAME)) == ("dy", "u")


def test_base_of_a_field() -> None:
    x, c, ci = (torch.full((2, 7), float(k)) for k in range(3))
    down, rows = Server(x, c), Client(ci)
    assert base_of(Mean(base="down.c"), down, rows) is c
    assert base_of(Mean(base="rows.ci"), down, rows) is ci
    assert base_of(Kept(primary=True), down, rows) == 0.0


class Listening(EquitableWeigher):
    """Remembers what it was asked about."""

    heard: list[Tensor] = Field(default_factory=list)

    def probe(self, down: Any, model: Tensor, work: Work) -> Tensor:
        self.heard.append(model)
        return super().probe(down, model, work)


def test_a_weigher_is_asked_about_the_absolute_model_whatever_the_base() -> None:
    p, local = Problem.random(3), LocalSGD(lr=0.1, batch_size=2)
    differences, absolute = Listening(), Listening()
    federate(SCAFFOLD(), p, 1, local=local, weigher=differences)
    end = federate(FLAME(), p, 1, local=local, weigher=absolute)[-1]
    steps = torch.tensor([[local.batches(size)] for size in p.sizes.tolist()])
    torch.testing.assert_close(differences.heard[0], p.descent(p.x0, steps, 0.1), rtol=0, atol=1e-12)
    torch.testing.assert_close(absolute.heard[0], end.kept.u, rtol=0, atol=0)


def test_gradient_mapping_without_penalty_is_the_norm_of_the_gradient() -> None:
    x, g = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for t in (0.1, 2.0):
        torch.testing.assert_close(gradient_mapping(None, x, g, t, TOY_LAYOUT), g.norm(dim=1, keepdim=True))
    at_zero = gradient_mapping(L1(c=1.0), torch.zeros_like(x), 0.9 * g / g.abs().max(), 0.3, TOY_LAYOUT)
    assert (at_zero == 0).all()


def test_ranks_of_matrices() -> None:
    body = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    row = torch.cat([body.flatten(), torch.tensor([0.0, 0.0, 5.0])])
    assert TOY_LAYOUT.ranks(row).tolist() == [1, 0]
    full = [min(shape) for shape in TOY_LAYOUT.matrix_shapes.values()]
    for broken in (torch.inf, -torch.inf, torch.nan):
        assert TOY_LAYOUT.ranks(torch.full((7,), broken)).tolist() == full


class Nameless(Algorithm):
    """Its server keeps z, which the default download cannot know."""

    def init(self, x0: Tensor, ctx: Ctx) -> tuple[Any, Nothing, None]:
        return Hidden(x0), Nothing(), None

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(descend(down.x, work) - down.x), rows

    def server(self, server: Any, up: Delta, ctx: Ctx) -> Any:
        return Hidden(server.z + up.dw)


class Hidden(NamedTuple):
    z: Tensor


class Misnamed(Nameless):
    def down(self, server: Any, kept: None, ctx: Ctx) -> Typo:
        return Typo(server.z)


class Typo(NamedTuple):
    x: Annotated[Tensor, Sent(prox="regularizer")]


def test_a_server_without_x_must_define_its_download() -> None:
    with pytest.raises(ConfigError, match="Nameless must define down: its server state has no field 'x'"):
        federate(Nameless(), Problem.random(0), 1)


def test_a_field_that_names_an_unknown_prox_is_refused() -> None:
    with pytest.raises(ConfigError, match="Misnamed: prox of the field 'x' is 'regularizer'"):
        encodings(Misnamed(), "down")


def test_the_default_download_and_state_are_the_model() -> None:
    p = Problem.random(0)
    server, rows, kept = FedAvg().init(p.x0, ReferenceFederation(p.oracle(), p.alpha, LocalSGD()).ctx(0, range(p.n)))
    assert (server, rows, kept) == (Model(p.x0), Nothing(), None)
    assert download_type(FedAvg) is Model
    assert FedAvg().global_model(server) is p.x0
    assert FedAvg().global_model(Hidden(p.x0)) is None


def test_how_clients_train_is_no_option_of_a_method() -> None:
    with pytest.raises(ConfigError, match=r"FedAvg: unknown key 'lr'\. .* Pass local=\{'lr': 0.1\} of the run"):
        FedAvg(lr=0.1)
