"""Sites that are let in and lie, over the real network.

They answer in another's name, send old replies again, or send messages that claim gigabytes.
"""

import json
import os
import threading
import time
from contextlib import ExitStack, suppress

import psutil
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from safetensors.torch import load_file

from fedloom_sites.deploy.ops.commands import command_words
from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.ops.processes import ManagedProcesses
from fedloom_sites.deploy.protocol.identity import read_signing_key
from fedloom_sites.deploy.setting_files import read_server, read_site, settings_text
from fedloom_sites.deploy.site.client import Client
from tests.deploy.wire import connected

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

VICTIM, LIAR = 1, 2


def in_the_name_of(reply, number):
    """The same reply, said to be from another node."""
    reply.metadata.__dict__["_src_node_id"] = number
    return reply


def joined(folder, processes, stack):
    """A running server, and its sites with their nodes on the wire and their clients in this process."""
    here = LoopbackDeployment(folder, processes)
    here.start_server()
    numbers = here.register_all()
    sites = [read_site(here.site_file(name)) for name in here.sites]
    nodes = [stack.enter_context(connected(site, here.address)) for site in sites]
    assert [node.number for node in nodes] == list(numbers.values())
    return here, sites, nodes, [Client(site) for site in sites]


def test_no_site_answers_for_another_and_no_reply_counts_twice(experiment, tmp_path):
    """The worst case: the liar knows the message, with its nonce, that the victim has to answer, and is faster.

    Round 1: the liar's own training in the victim's name, signed with the liar's key. Round 2: the victim's true reply
    of round 1 again. Both times Flower takes the forged reply and drops the honest one; the server counts neither,
    goes on with the other two sites, and takes the victim's reply in round 3.
    """
    folder = tmp_path / "try"
    write_directory(
        plan_deployment(experiment("fedavg", rounds=3, evaluate={"every": 3}), 3), folder, Location(quorum=2)
    )
    with ManagedProcesses() as processes, ExitStack() as stack:
        here, sites, nodes, clients = joined(folder, processes, stack)
        liar_as_victim = Client(sites[VICTIM].model_copy(update={"state": tmp_path / "liar"}))
        liar_as_victim._key = read_signing_key(sites[LIAR].signing_key)
        stream = here._start("run", command_words("run", app=folder / "server" / "app", file=here._server_file))
        kept, taken, trained = {}, {}, set()
        end = time.monotonic() + 800
        while stream.alive():
            assert time.monotonic() < end, stream.tail()
            for k, node in enumerate(nodes):
                message = node.receive()
                if message is None:
                    continue
                reply = clients[k].answer(message)
                head = message.content["head"]
                if k == VICTIM and head["kind"] == "train":
                    t = int(head["round"])
                    kept[t] = reply.content
                    if t == 1:
                        forged = liar_as_victim.answer(message)
                    elif t == 2:
                        forged = Message(RecordDict(dict(kept[1])), reply_to=message)
                    if t in (1, 2):
                        taken[t] = nodes[LIAR].send(in_the_name_of(forged, node.number))
                taken[k, head["kind"], int(head["round"])] = node.send(reply)
                trained |= {(k, int(head["round"]))} if head["kind"] == "train" else set()
            time.sleep(0.1)
        assert stream.reap() == 0, stream.tail()
        assert here.status() == "finished:completed", stream.tail(40)
    assert trained == {(k, t) for k in range(3) for t in (1, 2, 3)}
    assert all(taken[t] for t in (1, 2)), (
        "Flower refuses forged replies by itself now: the reason for this test is gone"
    )
    assert not taken[VICTIM, "train", 1]
    assert not taken[VICTIM, "train", 2]
    audit = [json.loads(line) for line in (folder / "server" / "state" / "audit.jsonl").read_text().splitlines()]
    training = [entry for entry in audit if entry.get("kind") == "train"]
    accepted = {(e["client"], e["round"]) for e in training if e["what"] == "accepted"}
    assert accepted == {(k, t) for k in range(3) for t in (1, 2, 3)} - {(VICTIM, 1), (VICTIM, 2)}
    reasons = {e["round"]: e["reason"] for e in training if e["what"] == "rejected"}
    assert "not made with the key of client 1" in reasons[1]
    assert reasons[2].startswith(("round is 1", "nonce is"))
    model = load_file(folder / "server" / "results" / "global.safetensors")["rows"]
    assert bool(torch.isfinite(model).all())


MB = 1 << 20


class Peak:
    """The most memory that the processes below this one have together, sampled."""

    def __init__(self) -> None:
        self.most, self._own, self._ended = 0, psutil.Process(), threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def now(self) -> int:
        total = 0
        for process in self._own.children(recursive=True):
            with suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def end(self) -> None:
        self._ended.set()

    def _sample(self) -> None:
        while not self._ended.wait(0.05):
            self.most = max(self.most, self.now())


def bomb(records):
    """A reply whose four arrays claim 3.8 GB, of parts that differ, 20 MB to send; the head is as it was."""
    arrays = {}
    for k in range(4):
        parts = [ArrayChunk(memoryview(os.urandom(MB))) for _ in range(5)]
        array = Array(dtype="uint8", shape=(950 * MB,), stype="fedloom.wire", data=b"")
        array.__dict__["_chunks"] = [(part.object_id, part) for part in parts] * 190
        arrays[f"{k}"] = array
    return RecordDict({**dict(records), "arrays": ArrayRecord(array_dict=arrays)})


def long_head(records):
    """A reply whose head has 20 MB."""
    head = dict(records["head"])
    return RecordDict({**dict(records), "head": ConfigRecord({**head, "vocabulary": ["x" * 1000] * 20_000})})


@pytest.mark.attack("messages beyond memory")
def test_messages_of_20_mb_take_little_memory_of_the_server(experiment, tmp_path, record_property):
    """Bombs by declared sizes in the place of a greeting, an upload and scores, and a head of 20 MB.

    After round 1, which is honest, the server's processes idle at what they have; the peak is less than that and one of
    the arrays of 950 MB that a message claims.
    """
    folder, kinds = tmp_path / "try", {}
    write_directory(
        plan_deployment(experiment("fedavg", rounds=3, clients=5, client_weights="uniform"), 5),
        folder,
        Location(quorum=2),
    )
    settings = folder / "server" / "server.toml"
    settings.write_text(settings_text(read_server(settings).with_(deadline=150.0, patience=90.0)))
    peak = Peak()
    with ManagedProcesses() as processes, ExitStack() as stack:
        here, _, nodes, clients = joined(folder, processes, stack)
        stream = here._start("run", command_words("run", app=folder / "server" / "app", file=here._server_file))
        stack.callback(peak.end)
        idle, end = 0, time.monotonic() + 800
        while stream.alive():
            assert time.monotonic() < end, stream.tail()
            for k, node in enumerate(nodes):
                message = node.receive()
                if message is None:
                    continue
                head = message.content["head"]
                kind, t = str(head["kind"]), int(head["round"])
                if not idle and kind == "train" and t == 2:
                    idle = peak.now()
                reply = clients[k].answer(message)
                if (k, kind) in {(4, "hello"), (3, "score")} or (k, kind, t) == (2, "train", 2):
                    kinds[kind] = node.send(Message(bomb(reply.content), reply_to=message))
                elif k == 3 and kind == "train" and t == 2:
                    kinds["head"] = node.send(Message(long_head(reply.content), reply_to=message))
                else:
                    node.send(reply)
            time.sleep(0.1)
        assert stream.reap() == 0, stream.tail()
        assert here.status() == "finished:completed", stream.tail(40)
    assert all(kinds.get(kind) for kind in ("hello", "train", "score", "head")), kinds
    record_property("tries", len(kinds))
    audit = [json.loads(line) for line in (folder / "server" / "state" / "audit.jsonl").read_text().splitlines()]
    reasons = {e["kind"]: e["reason"] for e in audit if e["what"] in ("rejected", "mute", "missed") and e.get("reason")}
    assert {"hello", "train", "score"} <= {*reasons}, reasons
    assert peak.most - idle <= 800 * MB, (peak.most // MB, idle // MB)
