"""Models away from their run: they predict, are written and read, take new data or refuse it, and adapt."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import fedloom as fl
from fedloom.algorithms import (
    ALGORITHMS,
    REGISTRY,
    Algorithm,
    Ditto,
    FedAMP,
    FedAvg,
    FedRep,
    FedSLR,
    PerFedAvg,
    PresetMethod,
)
from fedloom.data.dataset import Dataset
from fedloom.data.federation import Federation
from fedloom.data.input_spec import InputSpec, single_client_federation
from fedloom.engine.result import Result
from fedloom.engine.setting import Engine
from fedloom.errors import ConfigError, DataError, LayoutError, NoSamples
from fedloom.local import Ctx, LocalSGD, Work, descend
from fedloom.local.oracles import make_oracle
from fedloom.models import CNN, MLP, ModelSpec, Softmax
from fedloom.rows.layout import Layout
from fedloom.seeds import derive
from fedloom.tasks import make_task
from fedloom.trained.export import EXPORT_FORMATS, export_model, load
from fedloom.trained.model import Model
from fedloom.trained.models import Models
from fedloom.trained.saved import MODELS_PER_BATCH, SavedModels

NORMALISED = CNN(channels=(4,), kernel=3, norm="batch", hidden=(8,))
LOCAL = LocalSGD(lr=0.1, batch_size=20)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return fl.load("digits")


@pytest.fixture(scope="module")
def fed(digits: Dataset) -> Federation:
    return fl.partitions.mixed(clients=5, labels_per_client=3)(digits, seed=0)


@pytest.fixture(scope="module")
def stranger(digits: Dataset) -> Dataset:
    """Sixty samples of three classes, in no order."""
    own = (digits.y % 4 == 1).nonzero()[:60, 0]
    return replace(digits, x=digits.x[own], y=digits.y[own])


def run(fed: Federation, algorithm: Any, model: ModelSpec | None = None, **more: Any) -> Result:
    settings: dict[str, Any] = {"rounds": 2, "local": LOCAL, **more}
    return fl.simulate(algorithm, fed, model or MLP(hidden=(8,)), **settings)


def from_files(result: Result, folder: Path) -> Models:
    result.models.save(folder)
    job = result.job
    return Models(SavedModels(folder, job.algorithm, job.setting.model, job.setting.local, job.setting.seed, "mine"))


def part_of(fed: Federation, client: int, part: str = "test") -> Dataset:
    index = fed.indices(part, client)
    return replace(fed.data, x=fed.data.x[index], y=fed.data.y[index], test=None, columns={}, users=None, fitted=None)


# -------------------------------------------------------------------------------------------------------- they predict


@pytest.mark.parametrize("model", [MLP(hidden=(8,)), NORMALISED], ids=["mlp", "batch normalisation"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_model_scores_what_the_run_recorded(fed: Federation, model: ModelSpec, dtype: Any) -> None:
    result = run(fed, Ditto(), model, engine=Engine(dtype=dtype))
    for client in range(fed.n):
        own, shared = (result.models.model(kind, client) for kind in ("personal", "global"))
        for made, kind in ((own, "personal"), (shared, "global")):
            for name, value in made.score(part_of(fed, client)).items():
                assert value == pytest.approx(float(result.final(kind, name)[client]), abs=1e-5), (kind, name)
    takes = result.models.takes_global()
    for i, module in enumerate(result.models.hybrid):
        other = result.models["global"] if takes[i] else result.models.personal[i]
        x = fed.to(dtype=result.job.oracle.dtype).fetch(fed.indices("test", i))
        assert torch.equal(module(x), other(x))


def test_a_model_in_hand_takes_samples_as_python_has_them(fed: Federation, tmp_path: Path) -> None:
    models = run(fed, Ditto(), MLP(hidden=(8,))).models
    made, some = models.model("personal", 1), part_of(fed, 1)
    pair = (some.x.numpy(), some.y.tolist())
    assert made.score(pair) == made.score(some)
    assert torch.equal(models.adapt(pair).row, models.adapt(some).row)
    with pytest.raises(NoSamples, match="no rows to predict"):
        made.predict(some.x[:0].float())
    path = made.save(tmp_path / "one.safetensors")
    by_module = Model.load(path, MLP(hidden=(8,)).build((1, 8, 8), 10))
    assert np.array_equal(by_module.predict_proba(some.x), made.predict_proba(some.x))
    with pytest.raises(LayoutError, match="a different layout"):
        Model.load(path, "mlp")
    with pytest.raises(ConfigError, match="model must be a name, an nn.Module"):
        Model.load(path, 3)  # type: ignore[arg-type]


def test_a_table_s_model_takes_raw_columns_by_name_and_its_client_s_scaling() -> None:
    raw = fl.load("sklearn", set="wine")
    fed = fl.partitions.iid(clients=3)(raw, seed=0)
    result = run(fed, Ditto(), Softmax(), rounds=3)
    index = fed.indices("test", 1)
    order = torch.randperm(raw.x.shape[1], generator=torch.Generator().manual_seed(0))
    table: Any = raw.prepare
    shuffled = table.with_(columns=tuple(table.columns[k] for k in order.tolist()))
    turned = Dataset(
        "turned", raw.x[index][:, order], 2 - raw.y[index], "classification", raw.classes[::-1], prepare=shuffled
    )
    for kind in ("personal", "global"):
        want = float(result.final(kind, "loss")[1])
        assert result.models.model(kind, 1).score(turned)["loss"] == pytest.approx(want, rel=1e-5)
        assert result.models.model(kind, 2).score(turned)["loss"] != pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("name", ["fedavg", "local", "flame", "fedslr", "fedacs", "fedbn"])
def test_files_give_the_very_models(fed: Federation, stranger: Dataset, tmp_path: Path, name: str) -> None:
    made: Any = REGISTRY[name]()
    result = run(fed, made, NORMALISED if name == "fedbn" else None)
    live, filed = result.models, from_files(result, tmp_path)
    assert filed.kinds() == live.kinds()
    assert list(filed.names) == list(live.names)
    for kind in live.kinds():
        assert torch.equal(live.rows(kind), filed.rows(kind))
        some = torch.tensor([3, 1])
        assert kind == "global" or torch.equal(live.rows(kind, some), filed.rows(kind, some))
        assert kind == "global" or live.rows(kind, some[:0]).shape == filed.rows(kind, some[:0]).shape
        one, two = live.module(kind, 2), filed.module(kind, 2)
        assert all(torch.equal(t, two.state_dict()[key]) for key, t in one.state_dict().items())
    if "personal" in live.kinds():
        assert torch.equal(live.adapt(stranger).row, filed.adapt(stranger).row)


def test_more_clients_than_a_piece_are_read_one_by_one(digits: Dataset, tmp_path: Path) -> None:
    result = run(fl.partitions.iid(clients=40)(digits, seed=0), Ditto(), Softmax(), rounds=1)
    filed = from_files(result, tmp_path)
    assert torch.equal(filed.rows("personal", torch.tensor([39, 0, 32])), result.models.rows("personal")[[39, 0, 32]])


def test_clients_are_found_by_number_and_by_name_and_unknown_ones_are_refused(fed: Federation) -> None:
    models = run(replace(fed, names=("ann", "bob", "1", "eve", "kim")), Ditto()).models
    assert torch.equal(models.model("personal", "eve").row, models.model("personal", 3).row)
    assert torch.equal(models.model("personal", "1").row, models.model("personal", 2).row)
    with pytest.raises(ConfigError, match="unknown client 'bop'; did you mean 'bob'"):
        models.model("personal", "bop")
    with pytest.raises(ConfigError, match="ann, bob, eve, kim"):
        models.model("personal", 5)
    with pytest.raises(ConfigError, match="unknown client '²'"):
        models.model("personal", "²")
    assert torch.equal(models.rows("personal", [3, 0]), models.rows("personal")[[3, 0]])
    for odd in (5, -1):
        with pytest.raises(ConfigError, match=f"unknown client {odd}"):
            models.rows("personal", torch.tensor([0, odd]))
    with pytest.raises(ConfigError, match="Choose a client"):
        models.model("personal")
    assert len(models.personal) == 5
    with pytest.raises(IndexError):
        models.personal[5]
    with pytest.raises(ConfigError, match="FedAvg has no 'personal' model. Its models: global"):
        _ = run(fed, FedAvg()).models.personal


# ---------------------------------------------------------------------------------------------------------- new data


def test_new_data_is_refused_with_the_reason(fed: Federation, stranger: Dataset) -> None:
    facts = InputSpec.create(fed.data)

    def refused(sentence: str, **changes: Any) -> None:
        with pytest.raises(DataError, match=sentence):
            facts.take(replace(stranger, **changes))

    refused("shape 1x4x8, but the model takes 1x8x8", x=stranger.x[:, :, :4])
    refused("unknown class 'ten'", classes=(*stranger.classes[:9], "ten"))
    refused("values from 0 to 16", x=stranger.x.float())
    refused(
        "a regression, but the model was trained for a classification",
        y=torch.zeros(60, 1),
        task="regression",
        classes=(),
    )
    unnamed = facts.take(replace(stranger, classes=tuple(str(k) for k in range(10))))
    assert torch.equal(unnamed.y, stranger.y)


def test_a_table_with_other_columns_or_levels_is_refused(tmp_path: Path) -> None:
    def table(text: str) -> Dataset:
        path = tmp_path / f"t{abs(hash(text))}.csv"
        path.write_text(text)
        return fl.load(path, target="y", categorical=["colour"])

    rows = [f"{k},{('red', 'green', 'blue')[k % 3]},{k % 2}" for k in range(60)]
    data = table("\n".join(["a,colour,y", *rows]))
    fed = fl.partitions.iid(clients=2)(data, seed=0)
    facts = InputSpec.create(fed.data)
    again = InputSpec.model_validate_json(facts.model_dump_json())
    assert again == facts
    fewer = again.take(table("colour,a,y\nblue,3,1\nred,4,0\nblue,5,1\n"))
    assert fewer.x.tolist() == [[3, 0], [4, 2], [5, 0]]
    assert fewer.y.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match=r"lacks 'a'.*trained on the columns a, colour"):
        facts.take(table("b,colour,y\n1,red,0\n2,blue,1\n"))
    with pytest.raises(DataError, match="has 'b' too"):
        facts.take(table("a,b,colour,y\n1,2,red,0\n2,3,blue,1\n"))
    with pytest.raises(DataError, match="unknown level 'grey'. The model knows blue, green, red"):
        facts.take(table("a,colour,y\n1,grey,0\n2,blue,1\n"))
    with pytest.raises(DataError, match="not a table with the columns a, colour"):
        facts.take(Dataset("plain", torch.zeros(3, 2), torch.tensor([0, 1, 1]), "binary", ("0", "1")))


# --------------------------------------------------------------------------------------------------------- adapting


def started(result: Result, data: Dataset) -> tuple[Work, Tensor]:
    """The work of a new client in the round after the last, and the global model."""
    job = result.job
    fed = single_client_federation(InputSpec.create(job.eval_fed.data).take(data))
    oracle = make_oracle(result.models.recipe.build(), make_task(fed.data), fed)
    seed = derive(job.setting.seed, client=job.n, purpose="adapt")
    share = torch.full((1, 1), 1 / (job.n + 1))
    start = job.algorithm.global_model(result.state.server)
    return Work(oracle, torch.tensor([0]), share, job.setting.local, seed=seed, round=result.rounds + 1), start


def test_ditto_adapts_by_its_pulled_descent_from_the_global_model(fed: Federation, stranger: Dataset) -> None:
    result = run(fed, Ditto(lam=0.7))
    work, x = started(result, stranger)
    want = descend(x, work, pull=((0.7, x),))[0]
    torch.testing.assert_close(result.models.adapt(stranger).row, want)


def test_flame_adapts_by_its_theta_step(fed: Federation, stranger: Dataset) -> None:
    result = run(fed, REGISTRY["flame"](lam=2.0))
    work, x = started(result, stranger)
    torch.testing.assert_close(result.models.adapt(stranger).row, descend(x, work, pull=((2.0, x),))[0])


def test_fedslr_adapts_by_phase_two(fed: Federation, stranger: Dataset) -> None:
    result = run(fed, FedSLR(mu=0.05))
    work, x = started(result, stranger)
    prox = (fl.proxes.L1(c=0.05), x)
    want = descend(x, work, prox=prox, steps=work.epochs(1), stream="phase II")[0]
    made = result.models.adapt(stranger).row
    torch.testing.assert_close(made, want)
    assert 0 < int((made != x).sum()) < len(x)
    sparse = run(fed, FedSLR(mu=1e6)).models
    assert torch.equal(sparse.adapt(stranger, rounds=2).row, sparse.rows("global"))


def test_fedrep_adapts_its_head_only(fed: Federation, stranger: Dataset) -> None:
    result = run(fed, FedRep())
    moved = result.models.adapt(stranger).row != result.state.server[0]
    head = result.models.recipe.layout.mask("head")
    assert not bool(moved[~head].any())
    assert float(moved[head].float().mean()) > 0.5


def test_perfedavg_adapts_by_one_step(fed: Federation, stranger: Dataset) -> None:
    result = run(fed, PerFedAvg(alpha=0.05), local=LocalSGD(lr=0.1, batch_size="full"))
    work, x = started(result, stranger)
    torch.testing.assert_close(result.models.adapt(stranger).row, x - 0.05 * work.full_grad(x)[0])


def test_every_method_adapts_or_says_that_it_cannot(fed: Federation, stranger: Dataset) -> None:
    needed = {"fedspa": {"density": 0.5}}
    for name, kind in ALGORITHMS.items():
        made: Any = kind(**needed.get(name, {}))
        model = NORMALISED if name == "fedbn" else Softmax()
        result = run(fed, made, model, rounds=1, local=LocalSGD(lr=0.05, batch_size="full"))
        before = [t.clone() for t in result.state.server]
        if type(made).personal is Algorithm.personal:
            with pytest.raises(ConfigError, match="has no personal models"):
                result.models.adapt(stranger)
            continue
        one, two = (result.models.adapt(stranger, rounds=2) for _ in range(2))
        assert torch.equal(one.row, two.row), name
        assert bool(one.row.isfinite().all()), name
        assert all(torch.equal(a, b) for a, b in zip(before, result.state.server, strict=True)), name


def test_adapting_helps_where_labels_are_skewed(fed: Federation, stranger: Dataset) -> None:
    made = run(fed, Ditto(lam=0.1), rounds=3).models.adapt(stranger, rounds=20, holdout=0.3)
    scores = made.about["scores"]
    assert made.about["samples"] == {"train": 42, "test": 18}
    assert scores["adapted"]["accuracy"] > scores["global"]["accuracy"] + 0.2


def test_how_long_and_how_fast_is_for_the_caller(fed: Federation, stranger: Dataset) -> None:
    models = run(fed, Ditto(), local=LocalSGD(lr=0.1, steps=3)).models
    x = models.rows("global")
    far = [float((models.adapt(stranger, **how).row - x).norm()) for how in ({"steps": 1}, {}, {"epochs": 4})]
    assert far == sorted(far)
    with pytest.raises(
        ConfigError, match=r"steps = 0, so nothing would be trained\. Set at least one epoch or step in adapt"
    ):
        models.adapt(stranger, steps=0)
    assert float((models.adapt(stranger, lr=1e-6).row - x).norm()) < 1e-3
    with pytest.raises(ConfigError, match="epochs or steps, not both"):
        models.adapt(stranger, epochs=1, steps=1)
    with pytest.raises(ConfigError, match="rounds must be an integer from 1"):
        models.adapt(stranger, rounds=0)
    with pytest.raises(ConfigError, match="holdout must be"):
        models.adapt(stranger, holdout=1.0)
    ended = run(fed, Ditto(), local=LocalSGD(lr=0.1, schedule="cosine", decay_rounds=2)).models
    with pytest.raises(ConfigError, match="learning rate to 0 in round 3"):
        ended.adapt(stranger)
    assert bool(ended.adapt(stranger, lr=0.1).row.isfinite().all())


def test_an_adapted_model_is_written_and_read_with_its_normalisation(
    fed: Federation, stranger: Dataset, tmp_path: Path
) -> None:
    models = run(fed, Ditto(), NORMALISED).models
    made = models.adapt(stranger, rounds=2)
    path = made.save(tmp_path / "deep" / "own.safetensors")
    again = Model.load(path, NORMALISED)
    facts = again.recipe.facts
    for architecture in (NORMALISED, NORMALISED.build(facts.shape, facts.outputs, 9, None)):
        opened = fl.open_model(path, architecture)
        assert not opened.training
        assert all(torch.equal(a, b) for a, b in zip(opened.buffers(), again.module().buffers(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(opened.parameters(), again.module().parameters(), strict=True))
    with pytest.raises(LayoutError, match="a different layout"):
        fl.open_model(path, nn.Linear(2, 2))
    assert again.score(stranger) == made.score(stranger)
    with safe_open(path, "pt") as file:
        assert Layout.read_header(file.metadata()) == models.recipe.layout
    with pytest.raises(LayoutError, match="a different layout"):
        Model.load(path, MLP(hidden=(8,)))
    for name in ("personal", "server"):
        models.save(tmp_path)
        with pytest.raises(LayoutError, match="not contain exactly one model"):
            Model.load(tmp_path / f"{name}.safetensors", NORMALISED)
    with pytest.raises(LayoutError, match=r"does not contain exactly one model. It contains rows\.00000000"):
        fl.open_model(tmp_path / "personal.safetensors", nn.Linear(2, 2))
    with pytest.raises(LayoutError, match=r"a folder. Pass a file in it that contains one model \(global.safetensors"):
        fl.open_model(tmp_path, NORMALISED)
    (tmp_path / "bad.safetensors").write_bytes(b"no model")
    with pytest.raises(LayoutError, match="not a readable file of models"):
        Model.load(tmp_path / "bad.safetensors", NORMALISED)


# -------------------------------------------------------------------------------------------------------- exporting


def plain(state: dict[str, Tensor], spec: ModelSpec) -> nn.Module:
    module = spec.build((1, 8, 8), 10).eval()
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("global", MLP(hidden=(8,), dropout=0.2)), ("personal", NORMALISED)],
    ids=["global, dropout", "personal, batch normalisation"],
)
def test_exported_models_predict_alike_everywhere(fed: Federation, tmp_path: Path, kind: str, spec: ModelSpec) -> None:
    model = run(fed, Ditto(), spec).models.model(kind, 2)
    for format in EXPORT_FORMATS:
        assert export_model(model, tmp_path / format, format) == {}
    index = fed.indices("train", 2)
    x, raw = fed.fetch(index), fed.data.x[index]
    with torch.no_grad():
        outputs = model.module()(x)
        assert torch.equal(plain(load_file(tmp_path / "safetensors"), spec)(x), outputs)
    want = outputs.double().softmax(-1).numpy()
    np.testing.assert_allclose(model.predict_proba(raw), want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(load(tmp_path / "torch").scores(raw), want, rtol=0, atol=1e-6)
    session = onnxruntime.InferenceSession(tmp_path / "onnx")
    for count in (1, 2, len(x)):
        got, names = session.run(None, {"samples": raw[:count].numpy()})
        np.testing.assert_allclose(got, want[:count], rtol=0, atol=1e-5)
        assert names.tolist() == model.predict(raw[:count]).tolist()
    facts = InputSpec.model_validate_json(session.get_modelmeta().custom_metadata_map["facts"])
    assert facts.classes == fed.data.classes


def test_a_model_of_low_rank_is_exported_in_thin_layers(fed: Federation, tmp_path: Path) -> None:
    spec = MLP(hidden=(32,))
    model = run(fed, FedSLR(lam=0.03, defaults="paper"), spec, rounds=4).models.model("global")
    ranks = {format: export_model(model, tmp_path / format, format, factorised=True) for format in EXPORT_FORMATS}
    assert ranks["torch"] == ranks["safetensors"] == ranks["onnx"]
    assert ranks["torch"]
    index = fed.indices("train", 0)
    x, raw = fed.fetch(index), fed.data.x[index]
    thin = fl.models.make_thin_copy(spec.build((1, 8, 8), 10), ranks["safetensors"])
    thin.load_state_dict(load_file(tmp_path / "safetensors"))
    assert sum(p.numel() for p in thin.parameters()) < model.recipe.layout.d
    session = onnxruntime.InferenceSession(tmp_path / "onnx")
    with torch.no_grad():
        want = model.module()(x)
        torch.testing.assert_close(thin(x), want, rtol=0, atol=1e-5)
    for got in (session.run(["probabilities"], {"samples": raw.numpy()})[0], load(tmp_path / "torch").scores(raw)):
        np.testing.assert_allclose(got, want.double().softmax(-1).numpy(), rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="'flatten' is not a linear"):
        fl.models.make_thin_copy(spec.build((1, 8, 8), 10), {"flatten": 1})


def test_an_unknown_format_writes_nothing(fed: Federation, tmp_path: Path) -> None:
    model = run(fed, PresetMethod(FedAvg())).models.model("global")
    with pytest.raises(ConfigError, match="did you mean 'onnx'"):
        export_model(model, tmp_path / "folder" / "file", "onxx")
    assert list(tmp_path.iterdir()) == []


def test_what_the_server_mixes_for_all_is_mixed_once_for_all_models(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    down = FedAMP.down

    @wraps(down)
    def counted(self: FedAMP, server: Any, kept: Any, ctx: Ctx) -> Any:
        calls.append(ctx.m)
        return down(self, server, kept, ctx)

    monkeypatch.setattr(FedAMP, "down", counted)
    many = fl.partitions.iid(clients=2 * MODELS_PER_BATCH + 1)(digits, seed=0)
    result = run(many, FedAMP(), Softmax(), rounds=1)
    calls.clear()
    result.models.save(tmp_path)
    assert result.models.model("personal", MODELS_PER_BATCH).row.shape == (result.job.oracle.layout.d,)
    assert calls == [many.n]
