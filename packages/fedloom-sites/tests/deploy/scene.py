"""A deployment in a folder: an experiment file, keys, settings of a server and of its sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from safetensors.torch import load_file
from torch import Tensor

from fedloom.data.input_spec import InputSpec
from fedloom.engine.result import Result
from fedloom.engine.simulate import simulate
from fedloom.errors import Stop
from fedloom.lab.experiment import Experiment, parse, read
from fedloom.version import __version__
from fedloom_sites.deploy.audit import Audit
from fedloom_sites.deploy.ops.keys import make_key_pair
from fedloom_sites.deploy.protocol.envelope import digest_arrays, seal_message
from fedloom_sites.deploy.protocol.identity import sign_fields
from fedloom_sites.deploy.server.run import serve_run
from fedloom_sites.deploy.setting_files import sha256_hex
from fedloom_sites.deploy.settings import Member, Server, Site
from fedloom_sites.deploy.site.client import Client
from tests.deploy.grid import FakeGrid, Fault, outside_flower

FIRST = 100
"""Flower's number of the node of client 0."""

PAIRS = [(make_key_pair("signing"), make_key_pair("connection")) for _ in range(9)]


def document(method: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An experiment of one method on synthetic data."""
    return {
        "name": "parity",
        "rounds": 3,
        "seeds": [0],
        "data": {"source": "digits"},
        "partition": {"kind": "dirichlet", "clients": 3, "alpha": 0.5},
        "model": {"kind": "softmax"},
        "local": {"lr": 0.05, "epochs": 1, "batch_size": 200},
        "evaluate": {"every": 1},
        "engine": {"dtype": "float64", "gradient_engine": "loop"},
        "method": [method],
    } | changes


class Scene(NamedTuple):
    """What a test works with."""

    folder: Path
    experiment: Experiment
    server: Server
    sites: list[Site]

    def clients(self) -> list[Client]:
        """The sites, as after a start of their processes."""
        return [Client(site) for site in self.sites]

    def grid(self, fault: Fault | None = None, clients: list[Client] | None = None) -> FakeGrid:
        """All sites on a grid."""
        return FakeGrid({FIRST + c.site.client: c.answer for c in clients or self.clients()}, fault)

    def audit(self, what: str = "", **facts: Any) -> list[dict[str, Any]]:
        """Lines of the audit log with these facts."""
        wanted = facts | ({"what": what} if what else {})
        return [x for x in Audit(self.server.audit).lines() if {k: x.get(k) for k in wanted} == wanted]

    def model(self) -> Tensor:
        """The server's model."""
        return load_file(self.server.results / "global.safetensors")["rows"]

    def summary(self) -> dict[str, Any]:
        """What the server says at the end."""
        return json.loads((self.server.results / "summary.json").read_text())

    def serve(self, grid: FakeGrid | None = None, **settings: Any) -> Stop:
        """Run the server, quietly."""
        return serve_run(grid or self.grid(), self.server.with_(**settings), lambda _line: None)

    def simulate(self, **changes: Any) -> Result:
        """The same run in simulation."""
        experiment = self.experiment
        seed, method = experiment.head.seeds[0], experiment.methods[0]
        fed = experiment.partition(experiment.source.load(), seed)
        return simulate(method.setting, fed, **changes)


def scene(folder: Path, method: dict[str, Any] | str, **changes: Any) -> Scene:
    """A deployment of an experiment in a folder; quick to give up."""
    outside_flower()
    given = document({"algorithm": method} if isinstance(method, str) else method, **changes)
    path = folder / "experiment.toml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(parse(given).settings()))
    experiment = read(path)
    data = experiment.source.load()
    fed = experiment.partition(data, 0)
    shared: dict[str, Any] = {
        "name": "parity",
        "experiment": path,
        "fingerprint": sha256_hex(path.read_bytes()),
        "clients": fed.n,
        "samples": InputSpec.create(fed.data),
        "version": __version__,
    }
    sites = []
    for i in range(fed.n):
        state = folder / f"site-{i}"
        state.mkdir(exist_ok=True)
        (state / "signing-key").write_bytes(PAIRS[i][0].private)
        sites.append(
            Site(
                **shared,
                site=f"site-{i}",
                client=i,
                data=experiment.source_options,
                share="partition",
                state=state,
                server="localhost:1",
                signing_key=state / "signing-key",
            )
        )
    members = [
        Member(site=f"site-{i}", client=i, node_key=PAIRS[i][1].public, signing_key=PAIRS[i][0].public)
        for i in range(fed.n)
    ]
    server = Server(
        **shared, sites=tuple(members), quorum=fed.n, deadline=0.2, ttl=0.4, patience=0.4,
        checkpoints=folder / "checkpoints", audit=folder / "audit.jsonl", results=folder / "results",
    )  # fmt: skip
    return Scene(folder, experiment, server, sites)


def changed(
    reply: Message,
    client: int,
    head: dict[str, Any] | None = None,
    arrays: list[bytes] | None = None,
    metrics: dict[str, float] | None = None,
    edit: Callable[[RecordDict], RecordDict | None] = lambda records: None,
) -> Message:
    """A reply with other content, signed with the site's own key: what a hostile or faulty site can send.

    Args:
        reply: what an honest site sent.
        client: number of the site.
        head: fields of the head to replace.
        arrays: in place of its arrays.
        metrics: in place of its metrics.
        edit: changes the records after they were signed, or gives others.
    """
    old = dict(reply.content["head"])
    old.pop("signature")
    given = [a.data for a in reply.content["arrays"].values()] if arrays is None else arrays
    numbers = dict(reply.content.get("metrics", {})) if metrics is None else metrics
    new = {**old, "digest": digest_arrays(given), **(head or {})}
    key = signing_key_of(client)
    sealed = seal_message({**new, "signature": sign_fields(key, {**new, "metrics": numbers})}, given, numbers or None)
    other = Message(edit(sealed) or sealed, reply_to=_question(reply))
    other.metadata.__dict__.update(reply.metadata.__dict__)
    return other


def signing_key_of(client: int) -> Any:
    """A site's private key."""
    return load_ssh_private_key(PAIRS[client][0].private, None)


def _question(reply: Message) -> Message:
    question = Message(RecordDict(), dst_node_id=1, message_type=reply.metadata.message_type)
    question.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return question
