"""Reading of a torch program from an untrusted file. All parts are checked, and no part is unpickled.

`torch.export.load` alone would not be safe. That function falls back to the full unpickler, loads compiled libraries,
evaluates size expressions and guards as Python code, and calls any torch function that a graph names.
"""

from __future__ import annotations

import ast
import io
import json
import re
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch

TORCH_ENTRIES = ("archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id")
GRAPH_ENTRY, SAMPLES_ENTRY = "models/model.json", "data/sample_inputs/model.pt"
CONFIG_ENTRIES = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
TENSOR_ENTRY_PATTERN = re.compile(r"data/(weights/weight|constants/tensor)_\d+")
SOURCE_NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn")
"""References from a graph to its source code. These references are omitted."""
GRAPH_TEXT_PATTERN = re.compile(r"[\w.+-]*")
"""Pattern of the text in a graph, which may contain only names, versions and numbers. The pattern is strict because
this text becomes part of generated code."""
ARITHMETIC_FUNCTIONS = ("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "eq",
    "ne", "lt", "le",
              "gt", "ge", "and_", "or_", "not_")  # fmt: skip
FILE_OPERATIONS = ("from_file", "save")
SIZE_FUNCTIONS = ("Symbol", "Integer", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "PythonMod", "FloorDiv",
    "CeilDiv",
         "CleanDiv", "IntTrueDiv", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not")  # fmt: skip
"""Functions that may occur in a size expression."""
CONTAINER_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict")


def check_archive(content: bytes, facts: str) -> bytes:
    """Check all parts of a program's archive, and build a new archive from them.

    Args:
        content: content of a file written by `torch.export.save`.
        facts: name of the additional file in the archive.

    Raises:
        ValueError: the archive contains more than a graph of tensor operations, its tensors and the additional file.
    """
    with ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != ZIP_STORED for entry in entries):
            raise ValueError("its parts are compressed")
        parts = {entry.filename.partition("/")[2]: archive.read(entry) for entry in entries}
    if len(parts) < len(entries):
        raise ValueError("two of its parts have the same name")
    allowed = (*TORCH_ENTRIES, GRAPH_ENTRY, SAMPLES_ENTRY, *CONFIG_ENTRIES, f"extra/{facts}")
    for name in parts:
        if name not in allowed and not TENSOR_ENTRY_PATTERN.fullmatch(name):
            raise ValueError(f"it contains {name!r}")
    for name in CONFIG_ENTRIES:
        _check_config(json.loads(parts[name]))
    inputs = torch.load(io.BytesIO(parts[SAMPLES_ENTRY]), weights_only=True)
    parts[SAMPLES_ENTRY] = _encode_saved_value(inputs)
    parts[GRAPH_ENTRY] = json.dumps(_check_graph(json.loads(parts[GRAPH_ENTRY]))).encode()
    out = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(out)
    for name, part in parts.items():
        if name not in TORCH_ENTRIES[2:]:
            writer.write_record(name, part, len(part))
    writer.write_end_of_file()
    return out.getvalue()


def _encode_saved_value(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _check_config(config: dict[str, Any]) -> None:
    """Raise an error if tensors are pickled or stored outside the archive."""
    for name, payload in config["config"].items():
        if payload["use_pickle"] is not False or not re.fullmatch(r"(weight|tensor)_\d+", payload["path_name"]):
            raise ValueError(f"{name!r} is not a plain tensor")
    _check_words(config)


def _check_graph(document: dict[str, Any]) -> dict[str, Any]:
    """Check that a graph contains only tensor operations, and return it without its source notes and guards."""
    document = {**document, "guards_code": []}
    for node in document["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {key: text for key, text in node["metadata"].items() if key not in SOURCE_NOTES}
        _check_operation(node["target"])
    _check_words(document)
    return document


def _check_operation(target: str) -> None:
    first, *names = target.split(".")
    if first == "_operator" and len(names) == 1 and names[0] in ARITHMETIC_FUNCTIONS:
        return
    operation: Any = torch
    if first == "torch" and names[:2] == ["ops", "aten"] and len(names) == 4:
        for name in names:
            operation = getattr(operation, name, None)
    if not isinstance(operation, torch._ops.OpOverload) or names[2] in FILE_OPERATIONS:
        raise ValueError(f"its graph calls {target!r}")


def _check_words(value: object, key: str = "") -> None:
    """Raise an error if a text is more than one word, if the graph contains code, or if graphs are nested."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name in ("as_graph", "as_custom_obj", "as_operator") and item is not None:
                raise ValueError(f"its graph has an argument {name}")
            _check_words(name)
            _check_words(item, name)
    elif isinstance(value, list):
        for item in value:
            _check_words(item, key)
    elif isinstance(value, str) and key == "expr_str":
        _check_size(ast.parse(value, mode="eval").body)
    elif isinstance(value, str) and key in ("in_spec", "out_spec"):
        if value:
            _check_tree(json.loads(value)[1])
    elif isinstance(value, str) and GRAPH_TEXT_PATTERN.fullmatch(value) is None:
        raise ValueError(f"its graph contains the text {value[:40]!r}")


def _check_size(node: ast.AST) -> None:
    """Raise an error if an expression contains more than arithmetic on sizes."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in SIZE_FUNCTIONS:
            inner: list[ast.AST] = [*args, *(keyword.value for keyword in keywords)]
        case ast.BinOp(left=left, right=right):
            inner = [left, right]
        case ast.UnaryOp(operand=operand):
            inner = [operand]
        case ast.Compare(left=left, comparators=others):
            inner = [left, *others]
        case ast.Constant(value=value) if not isinstance(value, str) or re.fullmatch(r"[a-z]{1,2}\d+", value):
            inner = []
        case ast.Name(id=name) if re.fullmatch(r"[a-z]{1,2}\d+", name):
            inner = []
        case _:
            raise ValueError("a size in its graph is an unknown kind of expression")
    for part in inner:
        _check_size(part)


def _check_tree(tree: dict[str, Any]) -> None:
    """Raise an error if the containers of inputs or outputs have a type that would allow the file to select code."""
    if tree["type"] not in CONTAINER_TYPES:
        raise ValueError(f"its inputs or outputs are a {tree['type']!r}")
    for child in tree["children_spec"]:
        _check_tree(child)
