"""A torch program from elsewhere: whatever its file holds, nothing of it is unpickled, evaluated, called or loaded."""

from __future__ import annotations

import io
import json
import os
import pickle  # noqa: TID251 (to attack with)
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.errors import LayoutError
from fedloom.models import MLP
from fedloom.trained.export import export_model, load

Parts = dict[str, bytes]
MARK = "run_by_a_file"
"""A folder that every attack makes in the current directory."""
GRAPH, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (MARK,)


PICKLE = pickle.dumps(Bomb(), 2)


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def edited(name: str, change: Callable[[Any], None]) -> Callable[[Parts], None]:
    def apply(parts: Parts) -> None:
        document = json.loads(parts[name])
        change(document)
        parts[name] = json.dumps(document).encode()

    return apply


def graph(change: Callable[[Any], None]) -> Callable[[Parts], None]:
    return edited(GRAPH, lambda document: change(document["graph_module"]))


def added(name: str, part: bytes) -> Callable[[Parts], None]:
    return lambda parts: parts.update({name: part})


def weight(**payload: Any) -> Callable[[Parts], None]:
    """The first weight as another payload, whose file is a pickle."""

    def apply(parts: Parts) -> None:
        parts["data/weights/weight_0"] = saved(Bomb())
        edited(WEIGHTS, lambda d: next(iter(d["config"].values())).update(payload))(parts)

    return apply


def constant(name: str, part: bytes, *, use_pickle: bool) -> Callable[[Parts], None]:
    payload = {"path_name": name, "is_param": False, "use_pickle": use_pickle, "tensor_meta": None}

    def apply(parts: Parts) -> None:
        parts[f"data/constants/{name}"] = part
        edited(CONSTANTS, lambda d: d["config"].update(evil=payload))(parts)

    return apply


def call(target: str, *arguments: dict[str, Any]) -> Callable[[Parts], None]:
    """A further operation of the graph."""
    inputs = [{"name": "", "arg": arg, "kind": 1} for arg in arguments]
    node: dict[str, Any] = {
        "target": target,
        "inputs": inputs,
        "outputs": [],
        "metadata": {},
        "is_hop_single_tensor_return": None,
    }
    return graph(lambda g: g["graph"]["nodes"].insert(0, {**node, "name": "evil"}))


def size(text: str) -> Callable[[Parts], None]:
    """An expression in the place of the batch size."""

    def change(module: Any) -> None:
        sizes = module["graph"]["tensor_values"]["samples"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = text

    return graph(change)


def arguments(module: Any) -> None:
    signature = module["module_call_graph"][0]["signature"]
    signature["forward_arg_names"] = [f"samples=__import__('os').mkdir('{MARK}')"]


def container(module: Any) -> None:
    factory = {"default_factory_module": "antigravity", "default_factory_name": "fly"}
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    tree = {"type": "collections.defaultdict", "context": json.dumps(factory), "children_spec": [leaf]}
    module["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, tree])


TEXT = {"as_string": MARK}
EVAL = f"__import__('os').mkdir('{MARK}')"
PLAIN, HOLDS, CALLS, SIZE = "is not a plain tensor", "it contains '", "its graph calls '", "a size in its graph is"
ATTACKS: dict[str, tuple[Callable[[Parts], None], str]] = {
    "pickle of sample inputs": (added("data/sample_inputs/model.pt", saved(Bomb())), "Weights only load failed"),
    "bare pickle of sample inputs": (added("data/sample_inputs/model.pt", PICKLE), "Weights only load failed"),
    "pickle as a weight": (weight(use_pickle=True), PLAIN),
    "pickle as a weight of another name": (weight(use_pickle=True, path_name="evil"), PLAIN),
    "pickle by a path": (weight(use_pickle=False, path_name="../weights/weight_0"), PLAIN),
    "pickle as a constant": (constant("tensor_9", saved(Bomb()), use_pickle=True), PLAIN),
    "opaque object": (constant("opaque_obj_0", PICKLE, use_pickle=True), HOLDS),
    "script object": (constant("custom_obj_0", PICKLE, use_pickle=True), HOLDS),
    "legacy weights": (added("data/weights/model.pt", saved(Bomb())), HOLDS),
    "legacy constants": (added("data/constants/model.pt", saved(Bomb())), HOLDS),
    "compiled library": (added("data/aotinductor/model/evil.so", b"\x7fELF"), HOLDS),
    "second model": (added("models/other.json", b"{}"), HOLDS),
    "legacy archive": (added("serialized_state_dict.pt", saved(Bomb())), HOLDS),
    "function of os": (call("torch.os.mkdir", TEXT), CALLS),
    "function of torch": (call("torch.load", TEXT), CALLS),
    "function of torch.hub": (call("torch.hub.load", TEXT, TEXT), CALLS),
    "save": (call("torch.ops.aten.save", {"as_int": 1}, TEXT), CALLS),
    "file as tensor": (call("torch.ops.aten.from_file.default", TEXT, {"as_bool": True}, {"as_int": 8}), CALLS),
    "attribute of an operation": (call("torch.ops.aten.add.__class__", TEXT), CALLS),
    "library": (call("torch.ops.load_library", TEXT), CALLS),
    "operator": (call("_operator.attrgetter", TEXT), CALLS),
    "size": (size(EVAL), SIZE),
    "size in a call": (size(f"Max(1, {EVAL})"), SIZE),
    "size as an attribute": (size("Symbol('s0').__class__"), SIZE),
    "size of a text": (size(f'Symbol("{EVAL}")'), SIZE),
    "names of arguments": (graph(arguments), "its graph contains the text"),
    "container": (graph(container), "its inputs or outputs are a 'collections.defaultdict'"),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fed = fl.partitions.iid(clients=3)(fl.load("digits"), seed=0)
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    export_model(fl.simulate("fedavg", fed, MLP(hidden=(8,)), rounds=1).models.model("global"), path, "torch")
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def parts_of(path: Path) -> Parts:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def written(parts: Parts, *more: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile("changed.pt2", "w") as archive:
        for name, part in [*parts.items(), *more]:
            archive.writestr(f"archive/{name}", part)
    return Path("changed.pt2")


def scores(path: Path) -> torch.Tensor:
    return torch.from_numpy(load(path).scores(fl.load("digits").x[:5]))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_file_is_refused_and_runs_nothing(attack: str, program: Path) -> None:
    parts, (apply, words) = parts_of(program), ATTACKS[attack]
    apply(parts)
    changed = written(parts)
    with pytest.raises(LayoutError, match=rf"changed\.pt2 is not a model exported for torch .*{words}"):
        load(changed)
    assert os.listdir() == ["changed.pt2"]


def test_the_attacks_are_real(program: Path) -> None:
    parts = parts_of(program)
    ATTACKS["pickle of sample inputs"][0](parts)
    with suppress(TypeError):
        torch.export.load(written(parts))
    assert Path(MARK).is_dir()


def test_guards_of_a_file_are_not_evaluated(program: Path) -> None:
    parts = parts_of(program)
    edited(GRAPH, lambda document: document.update(guards_code=[EVAL]))(parts)
    assert torch.equal(scores(written(parts)), scores(program))
    assert not Path(MARK).exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_parts_of_one_name_are_refused(program: Path) -> None:
    name = "data/sample_inputs/model.pt"
    with pytest.raises(LayoutError, match="two of its parts have the same name"):
        load(written(parts_of(program), (name, saved(Bomb()))))


def test_what_is_no_archive_or_one_of_another_kind_is_refused(program: Path) -> None:
    whole = program.read_bytes()
    script = io.BytesIO()
    torch.save({"client_weights": torch.zeros(3)}, script)
    for content in (PICKLE, saved(Bomb()), script.getvalue(), whole[: len(whole) // 2], b""):
        Path("changed.pt2").write_bytes(content)
        with pytest.raises(LayoutError):
            load("changed.pt2")
    assert os.listdir() == ["changed.pt2"]


def test_a_compressed_part_is_refused_before_it_is_unpacked(program: Path) -> None:
    with zipfile.ZipFile("changed.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in {**parts_of(program), "extra/facts.json": bytes(1 << 24)}.items():
            archive.writestr(f"archive/{name}", part)
    with pytest.raises(LayoutError, match="compressed"):
        load("changed.pt2")


def test_a_program_that_was_written_anew_scores_as_before(program: Path) -> None:
    assert torch.equal(scores(written(parts_of(program))), scores(program))
