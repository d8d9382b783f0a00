"""Frozen parameters and low-rank adapters: what trains, what is shared, saved once, counted and refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.new_rows import new_rows
from fedloom.errors import ConfigError, LayoutError, Refused
from fedloom.lab.cli import app
from fedloom.local import LocalSGD, Work, descend
from fedloom.local.oracles import make_oracle
from fedloom.models import CNN, MLP, Adapters, Hub, ModelSpec, Transformer, add_adapters, head_prefixes, merge_adapters
from fedloom.rows.layout import Layout
from fedloom.tasks import Classification
from fedloom.trained.export import load

TRANSFORMER = Transformer(width=8, layers=2, heads=2)
TOKENS = (9, True)


def built(spec: ModelSpec, seed: int = 0, **adapters: Any) -> nn.Module:
    return spec.with_(adapters=adapters).build((6,), 5, seed, TOKENS)


def names(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


def test_adapters_are_the_only_parameters_that_train() -> None:
    module = built(TRANSFORMER, rank=2)
    assert names(module) == [
        f"blocks.{k}.attention.{part}.{factor}"
        for k in range(2)
        for part in ("query", "key", "value", "out")
        for factor in ("down", "up")
    ]
    assert Layout.create(module).d == 2 * 4 * 2 * (8 * 2)
    everywhere = names(built(TRANSFORMER, rank=2, on="linear"))
    assert {"blocks.0.fc1.down", "blocks.1.fc2.up", "head.down"} < {*everywhere}
    with_head = names(built(TRANSFORMER, rank=2, head=True))
    assert with_head[-2:] == ["head.weight", "head.bias"]
    assert "head.down" not in names(built(TRANSFORMER, rank=2, on="linear", head=True))


def test_an_adapter_starts_as_nothing_and_adds_a_product() -> None:
    x = torch.randint(1, 9, (3, 6), generator=torch.Generator().manual_seed(0))
    plain, module = TRANSFORMER.build((6,), 5, 0, TOKENS), built(TRANSFORMER, rank=3, on="linear", scale=0.5)
    torch.testing.assert_close(module(x), plain(x))
    before = {name: p.clone() for name, p in plain.state_dict().items()}
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("up"):
                p.normal_(generator=torch.Generator().manual_seed(1))
    together = merge_adapters(module)
    assert list(together.state_dict()) == list(before)
    torch.testing.assert_close(together(x), module(x))
    layer = module.get_submodule("blocks.0.fc1")
    wanted = before["blocks.0.fc1.weight"] + 0.5 * layer.up @ layer.down
    torch.testing.assert_close(together.get_submodule("blocks.0.fc1").weight, wanted)
    assert merge_adapters(plain) is plain


def test_initial_values_depend_on_the_seed_and_the_base_only_on_its_own_draw() -> None:
    a, b, other = (built(TRANSFORMER, seed, rank=2).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["blocks.0.attention.key.down"], other["blocks.0.attention.key.down"])
    plain = TRANSFORMER.build((6,), 5, 0, TOKENS).state_dict()
    assert torch.equal(a["blocks.0.attention.key.wrapped.weight"], plain["blocks.0.attention.key.weight"])


class SelfAttn(nn.Module):
    """Attention by its class's name."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.after = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.q(x))


def test_any_module_with_linear_layers_takes_them() -> None:
    module = add_adapters(nn.Sequential(SelfAttn(), nn.ReLU(), nn.Linear(3, 2)), Adapters(rank=1))
    assert names(module) == ["0.q.down", "0.q.up", "0.after.down", "0.after.up"]
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    own = add_adapters(encoder, Adapters(rank=2, on="linear"))
    assert names(own) == ["linear1.down", "linear1.up", "linear2.down", "linear2.up"]  # attention calls its own kernel
    x = torch.rand(2, 3, 8)
    with torch.no_grad():
        for name, p in own.named_parameters():
            if name.endswith("up"):
                p.fill_(0.1)
        torch.testing.assert_close(own.eval()(x), own.train()(x), atol=1e-5, rtol=0)
        torch.testing.assert_close(merge_adapters(own).train()(x), own.train()(x), atol=1e-5, rtol=0)
    assert all(p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize(
    ("spec", "adapters", "words"),
    [
        (
            MLP(hidden=(5,)),
            {"rank": 2},
            "no such linear layer .linear layers elsewhere: fc1, head. Use on",
        ),
        (
            CNN(channels=(2,), kernel=1, hidden=()),
            {"rank": 3, "on": "linear"},
            "'head' is 2x8, so its rank is at most 2",
        ),
        (MLP(hidden=()), {"on": "linear", "head": True}, "contains no such linear layer"),
    ],
)
def test_what_cannot_be_is_said(spec: ModelSpec, adapters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec.with_(adapters=adapters).build((1, 4, 4), 2)


def test_a_model_without_linear_layers_has_none() -> None:
    with pytest.raises(ConfigError, match="none at all"):
        add_adapters(nn.Sequential(nn.Conv2d(1, 1, 1)), Adapters(on="linear"))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(LayoutError, match="no parameter of Linear can be trained: all have requires_grad"):
        Layout.create(frozen)


def test_heads_are_known_by_the_name_of_their_adapter() -> None:
    assert head_prefixes(built(TRANSFORMER, rank=2, on="linear")) == ("head.",)
    assert head_prefixes(built(TRANSFORMER, rank=2, head=True)) == ("head.",)


# ---------------------------------------------------------------------------------------------------- what is trained


def federation() -> fl.data.Federation:
    g = torch.Generator().manual_seed(3)
    x = torch.randint(1, 9, (60, 6), generator=g)
    return fl.partitions.iid(clients=3, test=0.2, validation=0.2)(fl.Dataset.create((x, x % 5), vocabulary=9)).to(
        dtype=torch.float64
    )


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_training_is_that_of_the_adapters_by_hand(engine: str) -> None:
    fed, module = federation(), built(TRANSFORMER, rank=2, head=True)
    oracle = make_oracle(module, Classification(classes=5), fed, engine)
    ids = torch.arange(3)
    start = oracle.layout.vector(oracle.module).expand(3, -1).clone()
    work = Work(oracle, ids, torch.full((3, 1), 1 / 3), LocalSGD(lr=0.2, batch_size="full", epochs=3, momentum=0.5))
    rows = descend(start, work)
    for i in range(3):
        own = built(TRANSFORMER, rank=2, head=True).double()
        optimiser = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.2, momentum=0.5)
        index = fed.indices("train", i)
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.cross_entropy(own(fed.fetch(index)).mT, fed.data.y[index]).backward()
            optimiser.step()
        torch.testing.assert_close(rows[i], oracle.layout.vector(own), rtol=0, atol=1e-10)
    frozen = {name: p for name, p in oracle.module.named_parameters() if not p.requires_grad}
    fresh = dict(built(TRANSFORMER, rank=2, head=True).double().named_parameters())
    assert all(torch.equal(p, fresh[name]) for name, p in frozen.items())


def test_a_linear_network_with_a_frozen_layer_is_not_fused() -> None:
    module = MLP(hidden=(5,)).build((4,), 2)
    module.get_submodule("fc1").requires_grad_(False)
    fed = fl.partitions.iid(clients=2)((torch.rand(20, 4), torch.arange(20) % 2))
    oracle = make_oracle(module, Classification(classes=2), fed)
    assert oracle.name == "loop"
    assert oracle.layout.names == ("head.weight", "head.bias")


# --------------------------------------------------------------------------------------------------- through the doors

FILE = """
rounds = 2
seeds = [0, 1]
[data]
source = "docstrings"
length = 12
max_characters = 120
modules = "odd"
[partition]
kind = "natural"
clients = 3
validation = 0.2
[model]
kind = "transformer"
width = 8
layers = 1
heads = 2
init_from = "{weights}"
adapters = {{ rank = 2, on = "attention" }}
[local]
lr = 0.5
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
[[method]]
algorithm = "flame"
[[method]]
algorithm = "fedslr"
"""


def call(*words: object, code: int = 0) -> str:
    found = CliRunner().invoke(app, [str(word) for word in words])
    assert found.exit_code == code, found.output
    return found.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    data = fl.load("docstrings", length=12, max_characters=120)
    spec = Transformer(width=8, layers=1, heads=2)
    save_file(spec.build(data.shape, data.outputs, 7, data.tokens).state_dict(), folder / "base.safetensors")
    (folder / "a.toml").write_text(FILE.format(weights=folder / "base.safetensors"))
    call("run", folder / "a.toml", "--out", folder / "run")
    return folder / "run"


def test_rows_messages_and_files_hold_adapters_only(run: Path) -> None:
    d = 4 * 2 * (8 + 8)
    with safe_open(run / "models" / "ditto-0" / "personal.safetensors", "pt") as file:
        assert file.get_slice("rows.00000000").get_shape() == [3, d]
    opened = fl.open_run(run)
    rows = opened["fedavg", 0].table().to_pylist()
    (up,) = [r["value"] for r in rows if r["metric"] == "bytes_up" and r["round"] == 2]
    assert 2 * 3 * 4 * d <= up < 2 * 3 * (4 * d + 400)
    for seed in (0, 1):
        bases = [*run.glob(f"models/*-{seed}/base-*.safetensors")]
        assert len(bases) == 4
        assert len({path.stat().st_ino for path in bases}) == 1


def test_models_come_back_without_the_file_they_began_with(run: Path, tmp_path: Path) -> None:
    weights = run.parent / "base.safetensors"
    base = load_file(weights)
    model = fl.open_run(run)["flame", 0].models.model("personal", 1)
    wanted = model.predict_proba(["def the"])
    hidden = weights.rename(tmp_path / "elsewhere")
    try:
        again = fl.open_run(run)["flame", 0].models.model("personal", 1)
        np.testing.assert_array_equal(again.predict_proba(["def the"]), wanted)
        which = ("--method", "flame", "--seed", 0, "--client", 1)
        call("export", run, *which, "--out", tmp_path / "m.safetensors")
        call("export", run, *which, "--format", "torch", "--out", tmp_path / "m.pt2")
        call(
            "export",
            run,
            "--method",
            "flame",
            "--seed",
            0,
            "--format",
            "torch",
            "--client",
            1,
            "--out",
            tmp_path / "m.pt2",
        )
    finally:
        hidden.rename(weights)
    own = load_file(tmp_path / "m.safetensors")
    assert own.keys() == base.keys()
    changed = {name for name in own if not torch.equal(own[name], base[name])}
    assert changed == {f"blocks.0.attention.{part}.weight" for part in ("query", "key", "value", "out")}
    facts = model.recipe.facts
    plain = Transformer(width=8, layers=1, heads=2).build((12,), facts.outputs, 0, facts.tokens)
    plain.load_state_dict(own)
    x = new_rows(facts, ["def the"]).x
    np.testing.assert_allclose(load(tmp_path / "m.pt2").scores(["def the"]), wanted, atol=1e-6)
    np.testing.assert_allclose(plain(x).softmax(-1).detach().numpy(), wanted, atol=1e-6)


def test_an_adapted_client_is_a_file_that_holds_all_of_it(run: Path, tmp_path: Path) -> None:
    opened = fl.open_run(run)
    data = fl.load("docstrings", length=12, max_characters=120, modules="even")
    made = opened["ditto", 0].models.adapt(data, rounds=1, steps=2)
    path = made.save(tmp_path / "new.safetensors")
    again = opened.load(path)
    np.testing.assert_array_equal(again.predict_proba(["def"]), made.predict_proba(["def"]))


def test_another_base_is_another_run(run: Path) -> None:
    weights = run.parent / "base.safetensors"
    before = weights.read_bytes()
    other = {name: value + 1 for name, value in load_file(weights).items()}
    save_file(other, weights)
    try:
        call("run", run.parent / "a.toml", "--out", run.parent / "other", "--method", "fedavg", "--rounds", 1)
        a, b = (load_file(next((run.parent / o / "models/fedavg-0").glob("base-*"))) for o in ("run", "other"))
        assert not torch.equal(a["head.weight"], b["head.weight"])
    finally:
        weights.write_bytes(before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 9}, "its rank is at most 8"),
        ({"rank": 0}, "greater than 0"),
        ({"on": "atention"}, "'attention' or 'linear'"),
        ({"ranks": 2}, "ranks"),
    ],
)
def test_wrong_tables_are_refused_before_work(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    text = FILE.replace('init_from = "{weights}"', "").replace("{{", "{").replace("}}", "}")
    table = ", ".join(f"{k} = {v!r}" for k, v in {"rank": 2, **change}.items())
    (tmp_path / "a.toml").write_text(text.replace('rank = 2, on = "attention"', table))
    assert words in call("run", tmp_path / "a.toml", "--out", tmp_path / "run", code=2)
    assert not (tmp_path / "run").exists()


def test_weights_of_something_else_are_refused(tmp_path: Path) -> None:
    spec = MLP(hidden=(3,))
    save_file(spec.build((4,), 2).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"'head.weight' is \[2, 3\] in the file and \[5, 3\] in the model. Use"):
        spec.with_(init_from=str(tmp_path / "w.safetensors")).build((4,), 5)
    save_file({"head.weight": torch.zeros(2, 3)}, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match="'fc1.weight' is missing in the file and"):
        spec.with_(init_from=str(tmp_path / "w.safetensors")).build((4,), 2)
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        spec.with_(init_from=str(tmp_path / "none")).build((4,), 2)


def test_weights_with_a_digest_are_that_content_or_none(tmp_path: Path) -> None:
    spec, file = MLP(hidden=(3,)), tmp_path / "w.safetensors"
    save_file(spec.build((4,), 2, seed=7).state_dict(), file)
    named = spec.with_(init_from=f"{file}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}")
    torch.testing.assert_close(named.build((4,), 2).state_dict(), load_file(file))
    save_file(spec.build((4,), 2, seed=8).state_dict(), file)
    with pytest.raises(
        ConfigError, match="the SHA-256 is [0-9a-f]{64}, but [0-9a-f]{64} is required. Use the file with this digest"
    ):
        named.build((4,), 2)


def test_a_run_from_weights_with_a_digest_keeps_checkpoints(tmp_path: Path) -> None:
    spec, file = MLP(hidden=(3,)), tmp_path / "w.safetensors"
    save_file(spec.build((4,), 2).state_dict(), file)
    named = spec.with_(init_from=f"{file}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}")
    clients = [(torch.eye(4), torch.arange(4) % 2)]
    plain, kept, again = (
        fl.simulate("fedavg", clients, model, rounds=2, local={"lr": 0.1}, folder=folder).models.rows("global")
        for model, folder in (
            (spec.with_(init_from=str(file)), None),
            (named, tmp_path / "run"),
            (named, tmp_path / "run"),
        )
    )
    assert torch.equal(kept, plain)
    assert torch.equal(again, plain)


def test_a_deployment_refuses_a_file_that_sites_may_have_otherwise(run: Path) -> None:
    server = pytest.importorskip("fedloom_sites.deploy.server.run")
    with pytest.raises(Refused, match="nothing ensures that the sites have the same file"):
        server.check_deployable(fl.experiment.read(run.parent / "a.toml"))


# ------------------------------------------------------------------------------------------------------- transformers

TINY = {"bert": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}}
TINY |= {"gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2}}


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("each", [False, True])
def test_a_model_of_transformers_takes_adapters(kind: str, each: bool) -> None:
    pytest.importorskip("transformers")
    spec = Hub(config={"model_type": kind, **TINY[kind]}, adapters={"rank": 2, "head": True})
    x = torch.randint(1, 9, (24, 6), generator=torch.Generator().manual_seed(1))
    data = fl.Dataset.create((x, x % 5 if each else x[:, -1] % 5), vocabulary=9)
    fed = fl.partitions.iid(clients=2)(data)
    result = fl.simulate(fl.algorithms.Ditto(), fed, model=spec, rounds=2, local=LocalSGD(lr=0.1))
    layout = result.job.oracle.layout
    assert {name.rpartition(".")[2] for name in layout.names} == {"down", "up", "weight", "bias"}
    assert all("attention" in name or "attn" in name or name.startswith("head") for name in layout.names)
    assert bool(result.final("personal", "loss").isfinite().all())
    module = result.models.model("personal", 0).module()
    torch.testing.assert_close(merge_adapters(module)(x), module(x), atol=1e-5, rtol=0)


def test_what_transformers_cannot_make_is_said() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="'brt' cannot be created"):
        Hub(config={"model_type": "brt"}).build((6,), 5, 0, TOKENS)
    with pytest.raises(ConfigError, match="knows 3 tokens, but the data contain 9"):
        Hub(config={"model_type": "bert", **TINY["bert"], "vocab_size": 3}).build((6,), 5, 0, TOKENS)
    with pytest.raises(ConfigError, match="fails on samples of shape"):
        Hub(config={"model_type": "gpt2", **TINY["gpt2"], "n_positions": 2}).build((6,), 5, 0, TOKENS)
    with pytest.raises(ValueError, match="set either `name`, or `config`"):
        Hub()
