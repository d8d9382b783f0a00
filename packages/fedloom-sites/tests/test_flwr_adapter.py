"""Flower's private modules are imported in one file, and the installed release has every name of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedloom_sites
from fedloom.lazy import lazy_names
from fedloom_sites import flwr_adapter
from tests.deploy.grid import outside_flower

PUBLIC = {"flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
"""The modules that Flower documents for apps."""
PRIVATE_NAMES = {"_message_id", "_runtime_client", "_mods", "_Element"}
"""Attributes of Flower's and PyCryptodome's objects that are none of their interface."""
SOURCE = Path(fedloom_sites.__file__).parent


def private_parts(tree: ast.AST) -> Iterator[str]:
    """The private modules that code imports, and the private names that it uses as text, attribute or import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            yield from PRIVATE_NAMES & {alias.name for alias in node.names}
        else:
            names = []
            used = getattr(node, "attr", None) or (node.value if isinstance(node, ast.Constant) else None)
            if isinstance(used, str):
                yield from PRIVATE_NAMES & {used}
        yield from (n for n in names if n.partition(".")[0] in ("flwr", "flwr_datasets") and n not in PUBLIC)


def test_private_modules_are_imported_in_one_file() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): sorted(private_parts(ast.parse(path.read_text())))
        for path in SOURCE.rglob("*.py")
    }
    assert [path for path, parts in found.items() if parts] == ["flwr_adapter.py"]
    for line in (
        "import flwr.supercore.date",
        "from flwr.common import serde",
        "def f():\n    from flwr.proto.fleet_pb2 import A",
        "message.metadata.__dict__['_message_id'] = 1",
        "grid._runtime_client",
        "from Crypto.Protocol.SecretSharing import _Element",
    ):
        assert [*private_parts(ast.parse(line))], line


@pytest.mark.parametrize("name", lazy_names(flwr_adapter.__name__))
def test_the_installed_release_has_every_name(name: str) -> None:
    assert getattr(flwr_adapter, name) is not None


def test_each_name_is_there_without_the_others() -> None:
    """As in the process of a task: a module that nothing else has imported yet is found too."""
    for expression in ("task_program().run_clientapp", "flower_supernode", "run_superexec"):
        code = f"from fedloom_sites import flwr_adapter as a; assert a.{expression}"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, expression


def test_records_travel_as_bytes() -> None:
    records = RecordDict({"a": ConfigRecord({"x": 1, "y": b"2"}), "m": MetricRecord({"z": 0.5}), "r": ArrayRecord()})
    again = flwr_adapter.decode_records(flwr_adapter.encode_records(records))
    assert again["a"] == records["a"]
    assert again["m"] == records["m"]


def test_attributes_of_flowers_objects_are_where_they_were() -> None:
    outside_flower()
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    flwr_adapter.set_message_id(message, "seven")
    assert message.metadata.message_id == "seven"

    def mod(*_: object) -> None: ...

    assert flwr_adapter.get_mods(ClientApp(mods=[mod])) == [mod]
