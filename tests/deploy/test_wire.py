"""A site that is let in and lies: it answers in another's name, and sends old replies again, over the real network."""

import json
import time
from contextlib import ExitStack

import pytest
import torch
from flwr.app import Message, RecordDict
from safetensors.torch import load_file

from fedloom.deploy.ops.commands import command
from fedloom.deploy.ops.directory import Location, write
from fedloom.deploy.ops.loopback import Loopback
from fedloom.deploy.ops.plan import plan
from fedloom.deploy.ops.processes import Processes
from fedloom.deploy.protocol.identity import signing_key
from fedloom.deploy.settings import read_site
from fedloom.deploy.site.client import Client
from tests.deploy.wire import connected

pytestmark = [pytest.mark.slow, pytest.mark.deploy, pytest.mark.timeout(600)]

VICTIM, LIAR = 1, 2


def in_the_name_of(reply, number):
    """The same reply, said to be from another node."""
    reply.metadata.__dict__["_src_node_id"] = number
    return reply


def test_no_site_answers_for_another_and_no_reply_counts_twice(experiment, tmp_path):
    """The worst case: the liar knows the message, with its nonce, that the victim has to answer, and is faster.

    Round 1: the liar's own training in the victim's name, signed with the liar's key. Round 2: the victim's true reply
    of round 1 again. Both times Flower takes the forged reply and drops the honest one; the server counts neither,
    goes on with the other two sites, and takes the victim's reply in round 3.
    """
    folder = tmp_path / "try"
    write(plan(experiment("fedavg", rounds=3, evaluate={"every": 3}), 3), folder, Location(quorum=2))
    with Processes() as processes, ExitStack() as stack:
        here = Loopback(folder, processes)
        here.start_server()
        numbers = here.register_all()
        sites = [read_site(here.site_file(name)) for name in here.sites]
        nodes = [stack.enter_context(connected(site, here.address)) for site in sites]
        assert [node.number for node in nodes] == list(numbers.values())
        clients = [Client(site) for site in sites]
        liar_as_victim = Client(sites[VICTIM].model_copy(update={"state": tmp_path / "liar"}))
        liar_as_victim._key = signing_key(sites[LIAR].signing_key)
        stream = here._start("run", command("run", app=folder / "server" / "app", file=here._server_file))
        kept, taken, trained = {}, {}, set()
        end = time.monotonic() + 400
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
    assert "not signed with the key of client 1" in reasons[1]
    assert reasons[2].startswith(("round is 1", "nonce is"))
    model = load_file(folder / "server" / "results" / "global.safetensors")["rows"]
    assert bool(torch.isfinite(model).all())
