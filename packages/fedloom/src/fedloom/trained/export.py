"""Export of models to files for programs other than fedloom."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.input_spec import InputSpec
from fedloom.data.new_rows import new_rows
from fedloom.data.sources.table.levels import Factors
from fedloom.data.tables import Table, markers_of
from fedloom.errors import ConfigError, DataError, LayoutError, describe_cause
from fedloom.hints import unknown_name_error
from fedloom.models import factorize, merge_adapters
from fedloom.storage.checkpoint import save_tensors
from fedloom.storage.files import make_folder, write_atomic
from fedloom.trained.files import FACTS_FILE, check_model_file
from fedloom.trained.model import Model
from fedloom.trained.program import check_archive
from fedloom.trained.raw import RawModel, check_threshold, decide_labels

EXPORT_FORMATS = ("safetensors", "torch", "onnx")
MISSING_CODE = -1
"""Code of a missing or unknown text in a graph."""


def export_model(
    model: Model,
    path: Path | str,
    format: str = "safetensors",
    *,
    factorised: bool = False,
    threshold: float | None = None,
    force: bool = False,
) -> dict[str, int]:
    """Write a model to a file, as the state dict of a plain `nn.Module` or as a graph that accepts raw rows.

    A ``safetensors`` file contains the state dict, with adapters merged into their layers. Its metadata describe the
    input of the module (``facts``). ``onnx`` and ``torch`` files also contain imputation, scaling and levels. The
    graphs in these files return ``probabilities`` ``[batch, C]`` or ``values`` ``[batch, k]``:

    - For a table, ``onnx`` accepts ``numbers`` ``[batch, .]`` float64, in which missing cells are NaN or one of the
      training data's missing-value codes, and ``texts`` ``[batch, .]`` strings. The metadata entry ``columns`` lists
      the columns of both inputs in order. A missing or unknown text is imputed as in training. The graph also returns
      ``class`` ``[batch]``, which contains the names of the predicted classes.
    - For a table, ``torch`` accepts numbers and texts together as ``samples`` ``[batch, p]`` float64, with texts as
      codes. `load` converts rows to this form.
    - For sequences, both formats accept ``samples`` ``[batch, L]`` int64, in which tokens are padded with 0. If there
      is a label per position, they return ``probabilities`` ``[batch, L, C]``. ``facts`` contains the vocabulary.
    - For other data, both formats accept ``samples`` ``[batch, *shape]`` of a single dtype, because a graph cannot
      choose by dtype. If the model was trained on bytes, the type is uint8, and the bytes are divided by 255.
      Otherwise, it is float32, which is used unchanged.

    Args:
        model: model to write.
        path: the file. A file that fedloom wrote is replaced.
        format: one of `EXPORT_FORMATS`.
        factorised: True to replace each low-rank layer by two thin layers if this saves parameters (FedSLR).
        threshold: for ``onnx``, the minimum probability of the second of two classes at which it is predicted. If None,
            1/2.
        force: True to also replace files of a different kind.

    Returns:
        Ranks of the layers that were replaced by thin layers, keyed by layer name. `fedloom.models.make_thin_copy`
            builds a module with such layers.

    Raises:
        ConfigError: the format is unknown, the packages in the ``export`` extra are missing, the module cannot be
            converted to a graph, the scaling of a table is unknown, the threshold has no effect, or the path must not
            be written.
        CheckpointError: the disk is full or the write is rejected.
    """
    if format not in EXPORT_FORMATS:
        raise unknown_name_error("format", format, EXPORT_FORMATS)
    check_threshold(model.recipe.facts, threshold)
    if threshold is not None and format != "onnx":
        raise ConfigError(
            f"{format} does not predict classes, so a threshold has no effect. Export to onnx, or use the probabilities"
        )
    path = check_model_file(path, format, force=force)
    module, ranks = merge_adapters(model.module()), dict[str, int]()
    if factorised:
        thin = factorize(module)
        module, ranks = thin.module, thin.ranks
    header = model.recipe.header(model.about) | ({"ranks": json.dumps(ranks)} if ranks else {})
    header |= {} if threshold is None else {"threshold": repr(threshold)}
    make = {"onnx": _export_onnx, "torch": _export_program}.get(format)
    content = None if make is None else make(model.raw(module), model, header)
    make_folder(path.parent)
    if content is None:
        save_tensors(path, module.state_dict(), header)
    else:
        write_atomic(path, content)
    return ranks


def decision_sentence(model: Model, format: str, threshold: float | None) -> str:
    """Return a sentence about how an exported graph chooses the class, or "" if it does not return a class."""
    facts = model.recipe.facts
    if facts.task != "binary" or format == "safetensors":
        return ""
    how = "--threshold sets a different threshold for onnx" if threshold is None else "from --threshold"
    return (
        f"class {facts.classes[1]!r} if its probability is at least {0.5 if threshold is None else threshold:g}; {how}"
    )


def unit_sentence(model: Model, factors: Factors | None) -> str:
    """Return a sentence about columns that must be converted before they are passed to a file, or "" if there are none.

    Args:
        model: the exported model.
        factors: the training data's conversion factors (see `fedloom.data.sources.tabular.TableSource`). If None, the
            factors stored with the model are used.
    """
    table, client = model.recipe.facts.table, str(model.about.get("client", ""))
    columns, parts = set[str]() if table is None else {column.name for column in table.columns}, list[str]()
    for column, factor in (factors or model.about.get("conversion", {}).get("factors", {})).items():
        number = factor.get(client, 1.0) if isinstance(factor, Mapping) else factor
        several = isinstance(factor, Mapping) and not client
        if column in columns and (several or number != 1):
            parts.append(f"{column} by {'the factor of its client' if several else format(number, 'g')}")
    dates = model.about.get("conversion", {}).get("days_since", {})
    days = [f"{column} as days since {start}" for column, start in dates.items() if column in columns]
    sentences = [f"numbers are expected in the agreed-upon units. First multiply {', '.join(parts)}"] if parts else []
    sentences += [f"dates are expected as numbers: pass {', '.join(days)}"] if days else []
    return f"{'; '.join(sentences)}, as predict does" if sentences else ""


class Program:
    """Model exported for torch.

    Using it does not require the code of its architecture or execute any code in the file.

    Attributes:
        facts: facts about the model's input data.
        module: module that maps raw samples to probabilities or values (see `fedloom.trained.raw.RawModel`).

    Raises:
        LayoutError: the file does not contain a model exported for torch.
    """

    def __init__(self, path: Path | str) -> None:
        extra = {FACTS_FILE: ""}
        try:
            content = check_archive(Path(path).read_bytes(), FACTS_FILE)
            program = torch.export.load(io.BytesIO(content), extra_files=extra)
            self.facts = InputSpec.model_validate_json(extra[FACTS_FILE])
        except Exception as error:  # torch may raise any error for an untrusted file
            raise LayoutError(f"{path} is not a model exported for torch ({describe_cause(error)})") from None
        self.module = program.module()

    @torch.no_grad()
    def scores(self, rows: object) -> NDArray[np.float64]:
        """Return probabilities ``[N, C]`` or values ``[N, k]`` (see `fedloom.data.new_rows.new_rows` for the rows).

        Raises:
            DataError: the model does not accept these rows, for instance because they are floats and its graph accepts
                only bytes.
        """
        x = new_rows(self.facts, rows).x
        if self.facts.pixels and x.dtype != torch.uint8:
            raise DataError(
                "rows: this model accepts only bytes (uint8), got floats. Pass (x * 255).round().astype('uint8'), or "
                "use the original model, which also accepts floats from 0 to 1"
            )
        outputs: NDArray[np.float64] = self.module(x).numpy()
        return outputs

    def predict(self, rows: object) -> NDArray[Any]:
        """Return the names of the predicted classes ``[N]``, or the predicted values."""
        return decide_labels(self.facts, self.scores(rows))


def load(path: Path | str) -> Program:
    """Load a model exported with ``format = "torch"``.

    Raises:
        LayoutError: the file does not contain a model exported for torch.
    """
    return Program(path)


def _example_rows(model: Model) -> Tensor:
    """Return two raw samples."""
    facts = model.recipe.facts
    if facts.table is not None:
        return torch.zeros(2, len(facts.table.columns), dtype=torch.float64)
    if facts.vocabulary:
        return torch.ones(2, *facts.shape, dtype=torch.int64)
    return torch.zeros(2, *facts.shape, dtype=torch.uint8 if facts.pixels else torch.float32)


@contextmanager
def _suppress_output() -> Iterator[None]:
    """Within the block, suppress the exporters' output.

    If an exporter fails, its error is reported in a single sentence.
    """
    for exporter in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(exporter).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        raise ConfigError(
            f"this model cannot be exported as a graph ({describe_cause(root).splitlines()[0]}). Use "
            "safetensors, which stores only the parameters"
        ) from error


def _dynamic_batch() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim("batch", min=1)},)


def _export_program(raw: RawModel, model: Model, header: dict[str, str]) -> bytes:
    """Export the raw model as a torch program with a dynamic batch dimension."""
    out = io.BytesIO()
    with _suppress_output():
        program = torch.export.export(raw, (_example_rows(model),), dynamic_shapes=_dynamic_batch())
        torch.export.save(program, out, extra_files={FACTS_FILE: header["facts"]})
    return out.getvalue()


def _export_onnx(raw: RawModel, model: Model, header: dict[str, str]) -> bytes:
    """Export the raw model as an ONNX graph with a dynamic batch dimension."""
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise ConfigError(f"export to ONNX requires {error.name}: pip install 'fedloom[export]'") from None
    facts = model.recipe.facts
    output = "probabilities" if facts.classes else "values"
    with _suppress_output():
        program: Any = torch.onnx.export(
            raw, (_example_rows(model),), input_names=["samples"], output_names=[output],
            dynamic_shapes=_dynamic_batch(), dynamo=True, verbose=False, custom_translation_table=_onnx_operators(),
        )  # fmt: skip
    model_proto: Any = program.model_proto
    if facts.table is not None:
        model_proto = onnx.compose.add_prefix(model_proto, "net/", rename_inputs=False, rename_outputs=False)
        header = header | {"columns": json.dumps(_take_columns(onnx, model_proto.graph, facts.table))}
    if facts.classed:
        _name_classes(onnx, model_proto.graph, output, facts, header.get("threshold"))
    if "ai.onnx.ml" not in {opset.domain for opset in model_proto.opset_import}:
        model_proto.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    onnx.helper.set_model_props(model_proto, header)
    content: bytes = model_proto.SerializeToString()
    return content


def _onnx_operators() -> dict[Any, Any]:
    """Operators of kNN-Per that torch's exporter lacks: distances and a stable sort (ONNX breaks ties by position)."""
    from onnxscript import opset18 as op

    def cdist(x: Any, keys: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
        if p != 2:
            raise ConfigError(f"a distance of power {p}, not 2")
        differences = op.Sub(op.Unsqueeze(x, [-2]), op.Unsqueeze(keys, [-3]))
        return op.Sqrt(op.ReduceSum(op.Mul(differences, differences), [-1], keepdims=0))

    def stable_sort(x: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        width = op.Gather(op.Shape(x), [dim])
        return op.TopK(x, width, axis=dim, largest=int(descending), sorted=1)

    return {torch.ops.aten._cdist_forward.default: cdist, torch.ops.aten.sort.stable: stable_sort}


def _take_columns(onnx: Any, graph: Any, table: Table) -> dict[str, list[str]]:
    """Replace the input ``samples`` of a graph by the two inputs ``numbers`` and ``texts``.

    Return the names of each input's columns.
    """
    node, numbers = onnx.helper.make_node, [k for k, c in enumerate(table.columns) if not c.names]
    texts = [k for k, c in enumerate(table.columns) if c.names]
    del graph.input[:]
    nodes, parts = [], []
    if numbers:
        kind = onnx.TensorProto.DOUBLE
        graph.input.append(onnx.helper.make_tensor_value_info("numbers", kind, ["batch", len(numbers)]))
        parts.append("numbers")
        for marker in markers_of(table.missing).numbers:
            place, gap_free = f"marker {marker:g}", f"numbers but {marker:g}"
            graph.initializer.append(onnx.helper.make_tensor(place, kind, [], [marker]))
            nodes += [
                node("Equal", [parts[-1], place], [f"is {marker:g}"]),
                node("Where", [f"is {marker:g}", "nan", parts[-1]], [gap_free]),
            ]
            parts[-1] = gap_free
    graph.initializer.append(onnx.helper.make_tensor("nan", onnx.TensorProto.DOUBLE, [], [float("nan")]))
    if texts:
        kind = onnx.TensorProto.STRING
        graph.input.append(onnx.helper.make_tensor_value_info("texts", kind, ["batch", len(texts)]))
        graph.initializer.append(onnx.helper.make_tensor("gone", onnx.TensorProto.DOUBLE, [], [float(MISSING_CODE)]))
    for j, k in enumerate(texts):
        names, place = table.columns[k].names, f"column {j}"
        spellings = {f"{name}.0": code for code, name in enumerate(names) if name.lstrip("-").isdecimal()}
        codes = {**spellings, **{name: code for code, name in enumerate(names)}}
        graph.initializer.append(onnx.helper.make_tensor(place, onnx.TensorProto.INT64, [1], [j]))
        coding = {"keys_strings": [*codes], "values_int64s": [*codes.values()], "default_int64": MISSING_CODE}
        nodes += [
            node("Gather", ["texts", place], [f"{place} text"], axis=1),
            node("LabelEncoder", [f"{place} text"], [f"{place} code"], domain="ai.onnx.ml", **coding),
            node("Cast", [f"{place} code"], [f"{place} number"], to=onnx.TensorProto.DOUBLE),
            node("Equal", [f"{place} number", "gone"], [f"{place} gone"]),
            node("Where", [f"{place} gone", "nan", f"{place} number"], [f"{place} known"]),
        ]
        parts.append(f"{place} known")
    order = np.argsort([*numbers, *texts])
    graph.initializer.append(onnx.helper.make_tensor("order", onnx.TensorProto.INT64, [len(order)], order))
    nodes += [node("Concat", parts, ["unordered"], axis=1), node("Gather", ["unordered", "order"], ["samples"], axis=1)]
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *old])
    return {"numbers": [table.columns[k].name for k in numbers], "texts": [table.columns[k].name for k in texts]}


def _name_classes(onnx: Any, graph: Any, output: str, facts: InputSpec, threshold: str | None) -> None:
    """Add the output ``class``: the most probable class or, for two classes, the class chosen by a threshold."""
    text, node, tensor = [name.encode() for name in facts.classes], onnx.helper.make_node, onnx.helper.make_tensor
    graph.initializer.append(tensor("classes", onnx.TensorProto.STRING, [len(text)], text))
    if threshold is None:
        graph.node.append(node("ArgMax", [output], ["best"], axis=-1, keepdims=0))
    else:
        graph.initializer.append(tensor("second", onnx.TensorProto.INT64, [], [1]))
        graph.initializer.append(tensor("threshold", onnx.TensorProto.DOUBLE, [], [float(threshold)]))
        graph.node.append(node("Gather", [output, "second"], ["probability of the second"], axis=-1))
        graph.node.append(node("GreaterOrEqual", ["probability of the second", "threshold"], ["is the second"]))
        graph.node.append(node("Cast", ["is the second"], ["best"], to=onnx.TensorProto.INT64))
    graph.initializer.append(tensor("first", onnx.TensorProto.INT64, [], [0]))
    graph.initializer.append(tensor("no class", onnx.TensorProto.STRING, [], [b""]))
    graph.node.append(node("Gather", [output, "first"], ["probability of the first"], axis=-1))
    graph.node.append(node("IsNaN", ["probability of the first"], ["is undefined"]))
    graph.node.append(node("Gather", ["classes", "best"], ["likely class"]))
    graph.node.append(node("Where", ["is undefined", "no class", "likely class"], ["class"]))
    places = ["batch", *([facts.positions] if facts.each else [])]
    graph.output.append(onnx.helper.make_tensor_value_info("class", onnx.TensorProto.STRING, places))
