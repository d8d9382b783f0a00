"""Nodes of a run: their introductions, and their records in the run's folder."""

from __future__ import annotations

import json
import time
from logging import INFO, WARNING
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedloom.data.input_spec import InputSpec
from fedloom.errors import CheckpointError, ConfigError, FedloomError, WireError
from fedloom.storage import make_folder, write_atomic
from fedloom_sites.flower.records import VALUES_RECORD, head_of, log, write_values
from fedloom_sites.flower.samples import Signature
from fedloom_sites.flwr_adapter import ErrorCode
from fedloom_sites.transport.roll import NodeRegister

RUN_FILE = "run.json"
"""File of a run in its folder, next to the checkpoints."""
NODE_POLL_SECONDS = 1.0
"""Time in seconds between two searches for nodes."""
MODS_HINT = (
    "mods that change one record of the model do not fit, because a method sends rows. Leave the mod out, and clip or "
    "add noise with an upload transform of the strategy, such as upload_transform={'kind': 'clip', 'bound': 1.0}"
)
"""Advice for a node whose mods reject messages."""
STRANGE_NODE_REASON = (
    "it does not belong to the run in the folder. A node keeps its number if it has a key, and in a "
    "simulation every run of Flower has new nodes. To start again, name another folder"
)
"""Reason why a node does not take part in a run that began without it."""


class RunMembers(NamedTuple):
    """The nodes of a run.

    Attributes:
        nodes: Flower's node numbers, keyed by client.
        sizes: number of training, validation and test samples of each node.
        run: name of the run at the nodes. If the run cannot be resumed, the name is empty.
    """

    nodes: list[int]
    sizes: list[list[int]]
    run: str

    def roll(self) -> NodeRegister:
        """Return the registry of these nodes, with all nodes connected."""
        roll = NodeRegister({node: client for client, node in enumerate(self.nodes)}, torch.tensor(self.sizes))
        roll.connect(self.nodes)
        return roll


class NodeIntroduction(NamedTuple):
    """A node's description of its samples: their schema, the module's call signature, and their number per part."""

    schema: InputSpec
    signature: Signature
    sizes: list[int]

    def text(self, counted: bool = False) -> str:
        """Return a short description of the node's samples."""
        inputs = (f"{part.name} {[*part.shape]} {part.dtype}".strip() for part in self.signature.inputs)
        count = f"{'/'.join(map(str, self.sizes))} of " if counted else ""
        what = ", ".join(inputs) or str([*self.schema.shape])
        return f"{count}{what} for a {self.schema.task} with {self.schema.outputs} outputs"


def read_introduction(reply: Message) -> NodeIntroduction:
    """Return the introduction in a node's reply.

    Raises:
        FedloomError: the node cannot take part. The message states the reason.
    """
    if reply.has_error():
        cure = f"; {MODS_HINT}" if reply.error.code == ErrorCode.MOD_FAILED_PRECONDITION else ""
        raise WireError(f"the node did not answer: {reply.error.reason}{cure}")
    values = head_of(reply.content)
    if "error" in values:
        raise WireError(str(values["error"])[:500])
    sizes = values.get("sizes")
    if not isinstance(sizes, list) or len(sizes) != 3 or not all(type(k) is int and 0 <= k < 2**40 for k in sizes):
        raise WireError("the node's sample counts are invalid")
    try:
        schema = InputSpec.model_validate_json(str(values.get("schema")))
    except ValueError as error:
        raise WireError("the schema of the node's samples is invalid") from error
    signature = Signature.read(str(values.get("signature")))
    if signature.inputs and (sum(signature.widths),) != schema.shape:
        raise WireError("the node's sample signature does not match the shape of its samples")
    return NodeIntroduction(schema, signature, sizes)


class SavedRun(NamedTuple):
    """A run, as it is stored in its folder.

    Attributes:
        members: nodes that take part in the run.
        schema: description of the samples.
        signature: call signature of the modules.
        document: JSON text with the method and the choices of the run.
        parameters: names and shapes of the parameters of the model.
    """

    members: RunMembers
    schema: InputSpec
    signature: Signature
    document: str
    parameters: str

    def check(self, document: str, parameters: str, folder: Path | None) -> None:
        """Raise an error if this run differs from the stored run.

        Raises:
            ConfigError: the method, a choice or the model differs.
        """
        for name, new, old in (("run", document, self.document), ("model", parameters, self.parameters)):
            if new != old:
                raise ConfigError(
                    f"{folder} belongs to another {name}: {old[:200]}, but this is {new[:200]}. Name another folder"
                )

    def introduction(self, node: int) -> NodeIntroduction:
        """Return the introduction that a node sent at the start of the run."""
        return NodeIntroduction(self.schema, self.signature, self.members.sizes[self.members.nodes.index(node)])


def collect_introductions(
    grid: Grid, parameters: str, saved: SavedRun | None, min_nodes: int, wait: float, timeout: float
) -> dict[int, NodeIntroduction]:
    """Wait for nodes, ask each for its introduction, and return the matching introductions, keyed by node number.

    They must match each other, or the saved run if it exists.

    Args:
        grid: Flower's connection to the nodes.
        parameters: parameters of the server's model.
        saved: the run to resume. If None, a new run starts.
        min_nodes: minimum number of nodes.
        wait: number of seconds to wait for the nodes.
        timeout: number of seconds to wait for their answers.

    Raises:
        ConfigError: too few matching nodes are present.
    """
    end, reasons, strangers, logged = time.monotonic() + wait, dict[int, str](), dict[int, str](), -1
    while len(nodes := _awaited_nodes(grid, saved, strangers)) < min_nodes and (left := end - time.monotonic()) > 0:
        if len(nodes) != logged:
            logged = len(nodes)
            log(
                INFO, "fedloom: waiting at most %.0f s for %s nodes, of which %s are connected", left, min_nodes, logged
            )
        time.sleep(NODE_POLL_SECONDS)
    content = RecordDict({VALUES_RECORD: write_values(parameters=parameters)})
    messages = [Message(content, dst_node_id=node, message_type="query") for node in nodes]
    introduced: dict[int, NodeIntroduction] = {}
    for reply in grid.send_and_receive(messages, timeout=timeout) if messages else ():
        node = reply.metadata.src_node_id
        try:
            introduced[node] = read_introduction(reply)
        except FedloomError as error:
            reasons[node] = str(error)
    most = _commonest_samples([introduced[node] for node in nodes if node in introduced])
    for node, other in list(introduced.items()):
        like = most if saved is None else saved.introduction(node)
        if like and (other[:2] != like[:2] or (saved and other.sizes != like.sizes)):
            where = "those of most nodes" if saved is None else "before they were"
            reasons[node] = f"its samples are {other.text(saved is not None)}, {where} {like.text(saved is not None)}"
            del introduced[node]
    for node, reason in reasons.items():
        log(WARNING, "fedloom: node %s takes no part: %s", node, reason)
    if most is None or len(introduced) < min_nodes:
        why = "".join(f"; node {node}: {reason}" for node, reason in [*reasons.items(), *strangers.items()][:3])
        raise ConfigError(f"{len(introduced)} suitable nodes are connected, but {min_nodes} are needed{why}")
    return {node: introduced[node] for node in nodes if node in introduced}


def _commonest_samples(introduced: list[NodeIntroduction]) -> NodeIntroduction | None:
    """Return the first introduction with the most frequent schema and signature, or None if there is none."""
    return max(introduced, key=lambda one: sum(one[:2] == other[:2] for other in introduced), default=None)


def _awaited_nodes(grid: Grid, saved: SavedRun | None, strangers: dict[int, str]) -> list[int]:
    """Return the nodes that are present and may take part.

    All other nodes are added to ``strangers`` with a reason, and logged.
    """
    here = sorted(grid.get_node_ids())
    if saved is None:
        return here
    for node in here:
        if node not in saved.members.nodes and node not in strangers:
            strangers[node] = STRANGE_NODE_REASON
            log(WARNING, "fedloom: node %s takes no part: %s", node, STRANGE_NODE_REASON)
    return [node for node in here if node in saved.members.nodes]


def read_run(folder: Path) -> SavedRun | None:
    """Return the run stored in a folder, or None if the folder contains no run.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / RUN_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        members = RunMembers(**content["members"])
        schema, signature = InputSpec.model_validate(content["schema"]), Signature.read(content["signature"])
        return SavedRun(members, schema, signature, content["document"], content["parameters"])
    except (ValueError, TypeError, KeyError, WireError) as error:
        raise CheckpointError(f"{path} is damaged. Choose another folder to start again") from error


def write_run(folder: Path, saved: SavedRun) -> None:
    """Write a run to its folder.

    Raises:
        CheckpointError: the file cannot be written to the disk.
    """
    make_folder(folder)
    content = {
        **saved._asdict(),
        "members": saved.members._asdict(),
        "schema": saved.schema.model_dump(mode="json"),
        "signature": saved.signature.text(),
    }
    write_atomic(folder / RUN_FILE, json.dumps(content, indent=1).encode())
