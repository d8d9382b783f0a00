"""The same samples in every form and by every entrance give the same figures, or an error whose cure gives them."""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import fedloom as fl
from fedloom.data.input_spec import InputSpec
from fedloom.data.tables import Table
from fedloom.errors import ConfigError, DataError, FedloomError
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from fedloom.trained.export import export_model, load
from fedloom.trained.models import Models
from tests.cures import applied

RNG = np.random.default_rng(0)
Y = np.arange(48) % 2
BYTES = RNG.integers(0, 256, (48, 3, 5, 4)).astype(np.uint8)
BYTES[Y == 1, :2] //= 4
BYTES[0, 0, 0, :2] = 0, 255
FLOATS = (BYTES / 255).astype(np.float32)
LARGE = BYTES.astype(np.float32)
LAST = np.moveaxis(BYTES, 1, -1).copy()
CHOICES: dict[str, Any] = {"rounds": 3, "local": {"lr": 0.2}, "seed": 1}


class Samples(TorchDataset[Any]):
    """Samples with or without targets."""

    def __init__(self, give: Callable[[int], Any]) -> None:
        self._give = give

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, i: int) -> Any:
        return self._give(i)


class Hub(list[dict[str, Any]]):
    """A data set of the Hugging Face hub, as far as images are read from it."""

    column_names: ClassVar = ["image", "label"]
    features: ClassVar[dict[str, Any]] = {"image": type("Image", (), {})(), "label": types.SimpleNamespace(names=None)}


def pictures(x: Any = LAST) -> list[Image.Image]:
    return [Image.fromarray(one) for one in x]


LABELLED: dict[str, Callable[[Path], Any]] = {
    "arrays": lambda _: (BYTES, Y),
    "tensors": lambda _: (torch.from_numpy(BYTES), torch.from_numpy(Y)),
    "dictionary": lambda _: {"images": BYTES, "labels": Y},
    "channels last": lambda _: fl.Dataset.create((LAST, Y), channels_last=True),
    "TensorDataset": lambda _: TensorDataset(torch.from_numpy(BYTES), torch.from_numpy(Y)),
    "torch data set of tensors": lambda _: Samples(lambda i: (torch.from_numpy(BYTES[i]), int(Y[i]))),
    "torch data set of pictures": lambda _: Samples(lambda i: (Image.fromarray(LAST[i]), int(Y[i]))),
    "pictures that are said to have channels last": lambda _: fl.Dataset.create(
        Samples(lambda i: (Image.fromarray(LAST[i]), int(Y[i]))), channels_last=True
    ),
    "torch data set, channels last": lambda _: fl.Dataset.create(
        Samples(lambda i: (LAST[i], int(Y[i]))), channels_last=True
    ),
    "list of pairs": lambda _: [(x, int(y)) for x, y in zip(BYTES, Y, strict=True)],
    "list of dictionaries": lambda _: [{"image": x, "label": int(y)} for x, y in zip(BYTES, Y, strict=True)],
    "hub, pictures": lambda _: Hub({"image": p, "label": int(y)} for p, y in zip(pictures(), Y, strict=True)),
    "hub, as arrays": lambda _: Hub({"image": x, "label": int(y)} for x, y in zip(LAST, Y, strict=True)),
    "hub, as tensors": lambda _: Hub(
        {"image": torch.from_numpy(x), "label": int(y)} for x, y in zip(BYTES, Y, strict=True)
    ),
    "npz": lambda folder: fl.load(saved(folder, x=BYTES, y=Y)),
    "npz with other names": lambda folder: fl.load(saved(folder, images=BYTES, labels=Y)),
    "npz, channels last": lambda folder: fl.load(saved(folder, x=LAST, y=Y), channels_last=True),
}
UNLABELLED: dict[str, Callable[[Path], Any]] = {
    "array": lambda _: BYTES,
    "tensor": lambda _: torch.from_numpy(BYTES),
    "list of arrays": lambda _: list(BYTES),
    "list of tensors": lambda _: list(torch.from_numpy(BYTES)),
    "list of pictures": lambda _: pictures(),
    "data set": lambda _: fl.Dataset.create((BYTES, Y)),
    "torch data set": lambda _: Samples(lambda i: (torch.from_numpy(BYTES[i]), int(Y[i]))),
    "torch data set without targets": lambda _: Samples(lambda i: Image.fromarray(LAST[i])),
    "hub": lambda _: Hub({"image": p, "label": int(y)} for p, y in zip(pictures(), Y, strict=True)),
}
AS_FLOATS: dict[str, Any] = {
    "float32": FLOATS,
    "float64": BYTES / 255,
    "tensor": torch.from_numpy(FLOATS),
    "torch data set": Samples(lambda i: (torch.from_numpy(FLOATS[i]), int(Y[i]))),
    "list of tensors": list(torch.from_numpy(FLOATS)),
    "data set": fl.Dataset.create((FLOATS, Y)),
}


def saved(folder: Path, **arrays: Any) -> Path:
    path = folder / f"{'-'.join(arrays)}-{len(list(folder.iterdir()))}.npz"
    np.savez(path, **arrays)
    return path


def trained(data: Any, method: str = "ditto") -> Models:
    return fl.simulate(method, fl.partitions.iid(clients=2)(data, seed=0), "softmax", **CHOICES).models


@pytest.fixture(scope="module")
def of_bytes() -> Models:
    return trained((BYTES, Y))


@pytest.fixture(scope="module")
def of_floats() -> Models:
    return trained((FLOATS, Y))


@pytest.mark.parametrize("form", LABELLED)
def test_every_form_of_labelled_bytes_trains_scores_and_adapts_alike(
    form: str, of_bytes: Models, tmp_path: Path
) -> None:
    data = LABELLED[form](tmp_path)
    assert torch.equal(trained(data).rows("global"), of_bytes.rows("global"))
    assert of_bytes.model("global").score(data) == of_bytes.model("global").score((BYTES, Y))
    want = of_bytes.adapt((BYTES, Y))  # type: ignore[arg-type]
    assert torch.equal(of_bytes.adapt(data).row, want.row)
    fed = fl.Federation.create({"a": data, "b": data}) if not isinstance(data, fl.Dataset) else None
    assert fed is None or torch.equal(fed.data.x[: len(Y)], torch.from_numpy(BYTES))


@pytest.mark.parametrize("form", UNLABELLED)
def test_every_form_of_bytes_is_predicted_alike(form: str, of_bytes: Models, tmp_path: Path) -> None:
    want = of_bytes.predict_proba(BYTES)
    np.testing.assert_array_equal(of_bytes.predict_proba(UNLABELLED[form](tmp_path)), want)
    assert of_bytes.predict(UNLABELLED[form](tmp_path)).tolist() == of_bytes.predict(BYTES).tolist()


@pytest.mark.parametrize("form", AS_FLOATS)
def test_floats_from_0_to_1_are_predicted_as_the_bytes_are(form: str, of_bytes: Models, of_floats: Models) -> None:
    """By a model trained on either; before, a model trained on bytes divided these floats by 255 once more."""
    given = AS_FLOATS[form]
    want = of_bytes.predict_proba(BYTES)
    assert want.std() > 0.05
    np.testing.assert_allclose(of_bytes.predict_proba(given), want, atol=1e-6)
    np.testing.assert_allclose(of_floats.predict_proba(given), want, atol=1e-5)


def test_floats_score_and_adapt_as_the_bytes_do(of_bytes: Models) -> None:
    one = of_bytes.model("global")
    by_bytes, by_floats = one.score((BYTES, Y)), one.score((FLOATS, Y))
    assert by_floats == pytest.approx(by_bytes, abs=1e-6)
    assert by_bytes["accuracy"] > 0.8
    adapted = [of_bytes.adapt(fl.Dataset.create((x, Y))) for x in (BYTES, FLOATS)]
    torch.testing.assert_close(adapted[0].row, adapted[1].row)
    np.testing.assert_allclose(adapted[0].predict_proba(FLOATS), adapted[1].predict_proba(BYTES), atol=1e-5)


def test_a_mean_and_a_deviation_apply_to_bytes_and_floats_alike() -> None:
    scaled = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.1]}
    models = trained(fl.Dataset.create((BYTES, Y), **scaled))
    np.testing.assert_allclose(models.predict_proba(FLOATS), models.predict_proba(BYTES), atol=1e-5)
    plain = models.module("global")
    x = (torch.from_numpy(FLOATS) - torch.tensor(scaled["mean"])[:, None, None]) / torch.tensor(scaled["std"])[
        :, None, None
    ]
    want = plain(x).softmax(-1) if plain(x).shape[1] > 1 else torch.cat([1 - plain(x).sigmoid(), plain(x).sigmoid()], 1)
    np.testing.assert_allclose(models.predict_proba(FLOATS), want.detach().numpy(), atol=1e-5)


def test_bytes_with_noise_of_a_partition_were_bytes() -> None:
    """The noise makes floats of them; what comes later is divided by 255 all the same."""
    fed = fl.partitions.feature_noise(clients=2, sigma=0.1)(fl.Dataset.create((BYTES, Y)), seed=0)
    assert fed.data.x.is_floating_point()
    models = fl.simulate("fedavg", fed, "softmax", **CHOICES).models
    np.testing.assert_allclose(models.predict_proba(FLOATS), models.predict_proba(BYTES), atol=1e-6)


CURE = re.compile(
    r"(numpy\.moveaxis\(x, -1, 1\)|\(x \* 255\)\.round\(\)\.astype\('uint8'\)|x\.astype\('\w+'\)|x\.clip\(0, 1\)|"
    r"x / \d+|x\[None\]|x\.reshape\([-\d, ]+\))"
)


def cured(error: pytest.ExceptionInfo[Exception], x: Any) -> Any:
    """The samples after the first change that an error names."""
    named = CURE.search(re.split(r"; |\. ", str(error.value), maxsplit=1)[1])
    assert named is not None, str(error.value)
    return applied(named[0], x=x)


WRONG: dict[str, tuple[Any, str]] = {
    "whole numbers": (BYTES.astype(np.int64), r"got int64 values from 0 to 255; pass bytes"),
    "floats to 255": (LARGE, r"got float32 values from 0 to 255; pass bytes"),
    "floats to 255 with fractions": (FLOATS * np.float32(254.5), r"from 0 to 254.5; if they are from 0 to 255, pass x"),
    "16 bits": (BYTES.astype(np.uint16) * 257, r"got uint16 values from 0 to 65535; pass floats: x divided"),
    "a rounding above 1": (FLOATS * np.float32(1 + 1.2e-7), r"from 0 to 1.00000012; they exceed the range by rounding"),
    "a rounding below 0": (FLOATS - np.float32(1e-7) * (FLOATS == 0), r"from -1.00000001e-07 to 1; they exceed"),
    "flat": (BYTES.reshape(48, -1), "samples have shape 60, but the model takes 3x5x4. If the order of the values"),
    "channels last": (LAST, "samples have shape 5x4x3, but the model takes 3x5x4. The channels are last"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_numbers_are_refused_with_a_cure_that_works(case: str, of_bytes: Models) -> None:
    given, words = WRONG[case]
    with pytest.raises(DataError, match=words) as error:
        of_bytes.predict(given)
    np.testing.assert_allclose(of_bytes.predict_proba(cured(error, given)), of_bytes.predict_proba(BYTES), atol=5e-3)
    if case not in ("channels last", "flat"):  # of which fl.Dataset.create asks
        for entrance in (of_bytes.model("global").score, of_bytes.adapt):
            with pytest.raises(DataError, match=words) as error:
                entrance((given, Y))  # type: ignore[operator]
            entrance((cured(error, given), Y))  # type: ignore[operator]


def test_booleans_are_refused_since_true_may_be_1_or_255(of_bytes: Models) -> None:
    black_white = BYTES > 128
    with pytest.raises(
        DataError, match=r"got bool values from 0 to 1; pass x.astype\('float32'\) \(True is white\)"
    ) as error:
        of_bytes.predict(black_white)
    want = of_bytes.predict_proba(black_white.astype(np.uint8) * 255)
    np.testing.assert_allclose(of_bytes.predict_proba(cured(error, black_white)), want, atol=1e-6)


def test_floats_of_0_and_1_alone_are_floats(of_bytes: Models) -> None:
    """Of whole numbers it is not known, so these are refused."""
    few = (BYTES > 128).astype(np.float32)
    np.testing.assert_allclose(
        of_bytes.predict_proba(few), of_bytes.predict_proba((few * 255).astype(np.uint8)), atol=1e-6
    )
    with pytest.raises(DataError, match="got int64 values from 0 to 1; pass bytes"):
        of_bytes.predict(few.astype(np.int64))


@pytest.mark.parametrize("kind", [np.float16, torch.bfloat16])
def test_short_floats_are_floats(kind: Any, of_bytes: Models) -> None:
    given = torch.from_numpy(FLOATS).to(kind) if isinstance(kind, torch.dtype) else FLOATS.astype(kind)
    want = of_bytes.predict_proba(np.asarray(torch.as_tensor(given).float()))
    np.testing.assert_array_equal(of_bytes.predict_proba(given), want)
    np.testing.assert_allclose(want, of_bytes.predict_proba(BYTES), atol=0.02)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (BYTES[:0], "rows contains no rows to predict. Pass at least one row"),
        (FLOATS[:0], "rows contains no rows to predict. Pass at least one row"),
        ([], "the model takes|no rows"),
        (np.full_like(FLOATS, np.nan), r"NaN or Inf in 48 samples \(first: 0\). Repair them"),
        (FLOATS * 4 - 2, "pass the samples before normalization"),
        ((BYTES, Y), r"a tuple means features and targets \(x, y\), but this tuple contains"),
        ((BYTES[0], BYTES[1]), "targets. Pass x alone, or the samples as a list"),
        (BYTES.astype(complex), "must contain numbers, got complex"),
        (pd.DataFrame(BYTES.reshape(48, -1)), "is a table, but the model takes samples of shape 3x5x4"),
        (pa.table({"a": [1, 2]}), "is a table, but the model takes samples of shape 3x5x4"),
        (Image.fromarray(LAST[0]), "is a single picture. Pass a list of pictures"),
        (torch.utils.data.DataLoader(TensorDataset(torch.from_numpy(BYTES))), r"is a DataLoader\. Pass its \.dataset"),
    ],
)
def test_what_is_no_sample_is_refused_in_a_sentence(given: Any, words: str, of_bytes: Models) -> None:
    with pytest.raises(FedloomError, match=words):
        of_bytes.predict(given)


@pytest.mark.filterwarnings("ignore:samples. values are from")  # another scale, on purpose
def test_a_model_trained_on_floats_takes_no_bytes(of_floats: Models) -> None:
    """Whether its floats were bytes divided by 255 is not known."""
    large = trained((LARGE / 16, Y))
    for models, training in ((of_floats, FLOATS), (large, LARGE)):
        for given in (BYTES, list(BYTES), pictures(), torch.from_numpy(BYTES)):
            with pytest.raises(DataError, match="samples are bytes .* the model was trained on floats") as error:
                models.predict(given)
        for entrance in (models.model("global").score, models.adapt):
            with pytest.raises(DataError, match="samples are bytes"):
                entrance((BYTES, Y))  # type: ignore[operator]
        named = str(error.value)
        cures = {"to 1": FLOATS, "to 255": LARGE}
        for words, x in cures.items():
            piece = next(
                part for part in re.split(r"Convert the samples as for training: |, (?=x\.)", named) if words in part
            )
            found = CURE.search(piece)
            assert found is not None
            np.testing.assert_allclose(applied(found[0], x=BYTES), x, rtol=1e-6)
        assert len(models.predict(training)) == 48
        with pytest.raises(DataError, match="samples are bytes"):
            models.model("global").scores(torch.from_numpy(BYTES))


def test_samples_in_another_range_than_the_training_samples_have_a_warning(of_floats: Models) -> None:
    """Training on floats from 0 to 1, and on the same floats from 0 to 255."""
    large = trained((255 * FLOATS, Y))
    for models, far in ((of_floats, 255 * FLOATS), (of_floats, (FLOATS - 0.5) / 0.25), (large, FLOATS)):
        for entrance in (models.predict, models.predict_proba):
            with pytest.warns(UserWarning, match=r"samples: values are from .* in the training data they were from"):
                entrance(far)
        for entrance in (models.model("global").score, models.adapt):
            with pytest.warns(UserWarning, match="samples: values are from"):
                entrance((far, Y))  # type: ignore[operator]
    for ordinary in (FLOATS, FLOATS[:1], FLOATS / 2, FLOATS * 0, FLOATS * 0 + 1, (1.4 * FLOATS).clip(0, 1.4)):
        of_floats.predict(ordinary)
        large.predict(255 * ordinary)
    skewed = torch.from_numpy(np.geomspace(1e-6, 1, 96, dtype=np.float32).reshape(48, 2))
    spec = InputSpec.create(fl.Dataset.create((skewed, torch.from_numpy(Y))))
    assert not spec.note_far(skewed) + spec.note_far(skewed[:1]) + spec.note_far(skewed[:9])
    assert spec.note_far(skewed / 255)


def test_a_rare_level_of_a_column_of_a_table_is_not_far_away() -> None:
    table, x, owner = Table.numeric(1), torch.zeros(1000, 1, dtype=torch.float64), torch.zeros(1000, dtype=torch.long)
    x[::200] = 1
    fitted = table.fit(x, owner, owner == 0)[0]
    assert table.find_far(x[:1], fitted) == [] == table.note_outliers(x[:1], fitted)
    assert table.find_far(1000 * x[:1], fitted) == ["x0"]


def test_raw_samples_of_another_type_are_refused(of_bytes: Models) -> None:
    one = of_bytes.model("global")
    np.testing.assert_allclose(one.scores(torch.from_numpy(FLOATS)), one.scores(torch.from_numpy(BYTES)), atol=1e-6)
    with pytest.raises(DataError, match="samples are torch.int64, but the model was trained on bytes. Pass uint8, or"):
        one.scores(torch.from_numpy(BYTES).long())


@pytest.mark.filterwarnings("ignore:samples. values are from")  # another scale, on purpose
@pytest.mark.parametrize("given", [BYTES.astype(np.int32), BYTES.astype(np.uint16) * 257, BYTES > 128])
def test_integers_are_accepted_by_a_model_of_integers_only(given: Any, of_floats: Models) -> None:
    """Floats from 0 to 1 may have come from them, which no one knows."""
    with pytest.raises(DataError, match=r"samples are \w+, but the model was trained on floats") as error:
        of_floats.predict(given)
    assert len(of_floats.predict(cured(error, given))) == 48
    models = trained((given, Y))
    np.testing.assert_array_equal(models.predict_proba(given), models.predict_proba(given.astype(np.float32)))


def test_pictures_and_arrays_in_a_list_are_read_as_by_a_torch_data_set() -> None:
    """A palette was read as gray levels, and bytes beside floats from 0 to 1 as floats up to 255."""
    palette = [picture.convert("P") for picture in pictures()]
    want = fl.Dataset.create(Samples(lambda i: (palette[i], int(Y[i]))))
    for given in ((palette, Y), {"x": palette, "y": Y}, {"train": (palette, Y)}):
        assert torch.equal(fl.Dataset.create(given).x, want.x)
    for mode in ("YCbCr", "HSV", "CMYK"):  # their numbers were read as red, green and blue
        spaces = [picture.convert("RGB").convert(mode) for picture in pictures()]
        colors = np.stack([np.asarray(picture.convert("RGB")).transpose(2, 0, 1) for picture in spaces])
        assert torch.equal(fl.Dataset.create((spaces, Y)).x, torch.from_numpy(colors))
    assert torch.equal(fl.Dataset.create(pictures(), Y).x, torch.from_numpy(BYTES))
    for first, second in ((BYTES, FLOATS), (torch.from_numpy(BYTES), torch.from_numpy(FLOATS))):
        mixed = [*first[:1], *second[1:]]
        with pytest.raises(DataError, match=r"sample 0 is bytes \(uint8\), but sample 1 is"):
            fl.Dataset.create((mixed, Y))


@pytest.mark.parametrize("kind", ["uint16", "float32", "int32"])
def test_pictures_of_more_than_8_bits_are_refused_where_bytes_are_read(kind: str, tmp_path: Path) -> None:
    """Pillow clips them: 16 bits became nearly white, and floats from 0 to 1 black."""
    pixels = BYTES[0, 0].astype(kind) * {"uint16": 257, "float32": 1 / 255, "int32": 257}[kind]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Image.fromarray(pixels.astype(kind)).save(tmp_path / folder / "0.tif")
    with pytest.raises(DataError, match=r"0.tif has more than 8 bits per pixel .* Convert the images to 8 bits"):
        fl.load(tmp_path)
    converted = np.uint8(np.asarray(Image.open(tmp_path / "a" / "0.tif")) / pixels.max() * 255)
    for folder in ("a", "b"):
        Image.fromarray(converted).save(tmp_path / folder / "0.tif")
    assert abs(fl.load(tmp_path).x[0, 0].int() - torch.from_numpy(BYTES[0, 0]).int()).max() <= 1


def test_the_byte_order_of_a_file_changes_nothing(of_bytes: Models, tmp_path: Path) -> None:
    data = fl.load(saved(tmp_path, x=FLOATS.astype(">f4"), y=Y.astype(">i8")))
    assert of_bytes.model("global").score(data) == of_bytes.model("global").score((FLOATS, Y))
    ff = pytest.importorskip("fedloom_sites.flower")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 2))
    read = ff.Local(model, (FLOATS.astype(">f4"), Y.astype(">i8"))).read().fed.data
    assert torch.equal(read.x.flatten(1), torch.from_numpy(FLOATS).flatten(1))
    columns = FLOATS.reshape(48, -1)
    fitted = fl.sklearn.FederatedClassifier(rounds=1).fit(columns, Y)
    np.testing.assert_array_equal(fitted.predict(columns.astype(">f4")), fitted.predict(columns))
    tokens = np.arange(96).reshape(48, 2) % 5 + 1
    fed = fl.partitions.iid(clients=2)(fl.Dataset.create((tokens.astype(">i4"), Y), vocabulary=6))
    known = fl.simulate("fedavg", fed, "lstm", rounds=1).models
    np.testing.assert_array_equal(known.predict_proba(tokens.astype(">i8")), known.predict_proba(tokens))


def test_graphs_take_one_type_and_say_which(of_bytes: Models, of_floats: Models, tmp_path: Path) -> None:
    for models, x in ((of_bytes, BYTES), (of_floats, FLOATS)):
        one = models.model("global")
        want = one.predict_proba(x)
        export_model(one, tmp_path / "m.onnx", "onnx")
        export_model(one, tmp_path / "m.pt2", "torch")
        graph, program = onnxruntime.InferenceSession(tmp_path / "m.onnx"), load(tmp_path / "m.pt2")
        assert [i.type for i in graph.get_inputs()] == [f"tensor({'uint8' if x is BYTES else 'float'})"]
        np.testing.assert_allclose(graph.run(["probabilities"], {"samples": x})[0], want, atol=1e-6)
        np.testing.assert_allclose(program.scores(x), want, atol=1e-6)
        np.testing.assert_allclose(program.scores(list(torch.from_numpy(x))), want, atol=1e-6)
    with pytest.raises(DataError, match="samples are bytes"):
        program.scores(BYTES)
    export_model(of_bytes.model("global"), tmp_path / "m.pt2", "torch")
    program = load(tmp_path / "m.pt2")
    with pytest.raises(DataError, match=r"this model accepts only bytes \(uint8\), got floats. Pass") as error:
        program.predict(FLOATS)
    np.testing.assert_allclose(program.scores(cured(error, FLOATS)), of_bytes.predict_proba(BYTES), atol=1e-6)
    with pytest.raises(DataError, match="got int64 values"):
        program.predict(BYTES.astype(int))


def test_commands_take_bytes_and_floats_of_files_alike(tmp_path: Path) -> None:
    np.savez(tmp_path / "known.npz", x=BYTES, y=Y)
    text = f'rounds = 3\n[data]\nsource = "{tmp_path}/known.npz"\n[local]\nlr = 0.2\n[model]\nkind = "softmax"\n'
    text += '[partition]\nclients = 2\n[[method]]\nalgorithm = "ditto"\n'
    Plan(parse(tomllib.loads(text)), tmp_path / "run").run(page=False)
    opened = fl.open_run(tmp_path / "run")
    want = opened.predict(BYTES).scores
    files = {"bytes": BYTES, "floats": FLOATS, "wide": BYTES / 255}
    figures = []
    for name, x in files.items():
        np.savez(tmp_path / f"{name}.npz", x=x, y=Y)
        np.testing.assert_allclose(opened.predict(tmp_path / f"{name}.npz").scores, want, atol=1e-6)
        words = ["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / f"{name}.npz")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        figures.append(done.output)
        words = ["adapt", str(tmp_path / "run"), "--data", str(tmp_path / f"{name}.npz")]
        assert CliRunner().invoke(app, words).exit_code == 0
    (tmp_path / "pictures").mkdir()
    for k, picture in enumerate(pictures()):
        picture.save(tmp_path / "pictures" / f"{k:02}.png")
    np.testing.assert_array_equal(opened.predict(tmp_path / "pictures").scores, want)
    assert len({re.sub(r"0\.\d+", lambda number: f"{float(number[0]):.3f}", said) for said in figures}) == 1
    for name, x in {"whole": BYTES.astype(int), "few": (BYTES > 128).astype(int), "large": LARGE}.items():
        np.savez(tmp_path / f"{name}.npz", x=x, y=Y)
        for command in (["predict"], ["evaluate", "--data"], ["adapt", "--data"]):
            words = [command[0], str(tmp_path / "run"), *command[1:], str(tmp_path / f"{name}.npz")]
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 2, done.output
            assert "the model was trained on bytes" in done.output.replace("\n", " ")


def test_a_table_is_the_same_rows_as_a_frame_an_arrow_table_and_columns() -> None:
    """Bytes of a table are numbers, whose columns are scaled."""
    frame = pd.DataFrame({f"c{k}": BYTES[:, 0, 0, k] for k in range(4)})
    models = trained(fl.Dataset.create(frame.assign(y=Y), "y"))
    want = models.predict_proba(frame, client=0)
    table = pa.Table.from_pandas(frame)
    for given in (table, {c: frame[c].tolist() for c in frame}, frame.to_numpy(), frame.to_numpy(float)):
        np.testing.assert_array_equal(models.predict_proba(given, client=0), want)
    numbers = fl.sklearn.FederatedClassifier(rounds=2, lr=0.5).fit(frame.to_numpy(), Y)
    scores = numbers.predict_proba(frame.to_numpy(float))
    for given in (frame.to_numpy(), frame.to_numpy().tolist(), frame.to_numpy(float)):
        np.testing.assert_array_equal(numbers.predict_proba(given), scores)


def test_a_node_of_a_flower_app_takes_floats_and_asks_about_bytes() -> None:
    ff = pytest.importorskip("fedloom_sites.flower")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(60, 2))
    floats, y = torch.from_numpy(FLOATS), torch.from_numpy(Y)
    want = ff.Local(model, (floats, y)).read().fed.data.x
    for given in (TensorDataset(floats, y), Samples(lambda i: (floats[i], int(Y[i]))), (FLOATS, Y)):
        assert torch.equal(ff.Local(model, given).read().fed.data.x, want)
    for given in ((BYTES, Y), TensorDataset(torch.from_numpy(BYTES), y)):
        with pytest.raises(
            ConfigError, match=r"are bytes \(uint8\), and fedloom cannot know whether the model divides the bytes. Pass"
        ) as error:
            ff.Local(model, given).read()
        x = applied(
            str(error.value).split("bytes. Pass floats, such as")[1].split(", or ")[0], x=torch.from_numpy(BYTES)
        )
        torch.testing.assert_close(ff.Local(model, (x, y)).read().fed.data.x, want)
    with pytest.raises(
        ConfigError, match="sample 0 is a list of 2 entries. Use a tuple whose last entry is the target"
    ):
        ff.Local(model, Samples(lambda i: [floats[i], int(Y[i])])).read()


def test_a_run_shows_the_notes_on_its_data_however_it_is_started() -> None:
    data = fl.Dataset.create((LARGE, Y + 1))
    fed = fl.partitions.iid(clients=2)(data, seed=0)
    notes = fl.simulate("fedavg", fed, "softmax", rounds=1).notes
    for words in (
        "data: x contains numbers of up to 255. Floats are used without scaling",
        "data: the data contain no sample of",
    ):
        assert [note.startswith(words) for note in notes].count(True) == 1
    by_hand = fl.Federation(data, fed.parts, fed.names)
    assert any("numbers of up to 255" in note for note in fl.simulate("fedavg", by_hand, rounds=1).notes)
    comparison = fl.compare(["fedavg"], fed, "softmax", rounds=1, seeds=[0, 1], progress_bar=False)
    recorded = fl.open_run(comparison.folder)
    said = (recorded.path / "summary.json").read_text()
    assert said.count("numbers of up to 255") == 2, "once for every seed"
