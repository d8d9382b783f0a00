"""A real server whose sites stop or are missing: rounds go on without them, and a run that cannot says why, no more."""

import json
import os
import signal
from datetime import datetime

import pytest

from fedloom_sites.deploy.ops.directory import Location, write_directory
from fedloom_sites.deploy.ops.loopback import LoopbackDeployment
from fedloom_sites.deploy.ops.plan import plan_deployment
from fedloom_sites.deploy.ops.processes import ManagedProcesses, ProcessError
from fedloom_sites.deploy.setting_files import read_server, settings_text

pytestmark = [pytest.mark.slow, pytest.mark.deploy]

DEADLINE = 90.0
ROUNDS = 3
REPORTED = 90.0
"""Seconds within which Flower reports a node that is gone; measured: 40 to 60."""
MOMENT = 10.0
"""Seconds from the last reply that a round waits for to its end, on a busy machine."""


@pytest.fixture(scope="module")
def three(experiment, tmp_path_factory):
    """A server that knows three sites; the first two are there."""
    folder = tmp_path_factory.mktemp("stall") / "try"
    write_directory(
        plan_deployment(experiment("fedavg", rounds=ROUNDS, evaluate={"every": ROUNDS}), 3), folder, Location(quorum=3)
    )
    with ManagedProcesses() as processes:
        here = LoopbackDeployment(folder, processes)
        here.start_server()
        here.register_all()
        here.running = {name: here.start_site(name) for name in ("site-0", "site-1")}
        yield here


def settle(here, **changes):
    """Other settings of the server, from its next run on."""
    file = here.folder / "server" / "server.toml"
    file.write_text(settings_text(read_server(file).model_copy(update=changes)))


def test_a_run_without_its_quorum_says_one_sentence(three):
    settle(three, patience=60.0, deadline=DEADLINE, ttl=DEADLINE)
    said = []
    with pytest.raises(ProcessError) as error:
        three.run(said.append)
    assert str(error.value).startswith("stops: too few")
    assert "2 of 3 sites are connected, missing: site-2" in str(error.value)
    assert "\n" not in str(error.value)
    assert three.status() == "finished:failed"
    for log in three.work.rglob("*.log"):
        assert "nhandled" not in log.read_text(), log
        assert "Traceback" not in log.read_text(), log
    assert not [line for line in said if "rror" in line or "Traceback" in line or "nhandled" in line]


def test_a_disk_that_cannot_be_used_is_one_sentence_too(three, tmp_path):
    (tmp_path / "file").touch()
    before = read_server(three.folder / "server" / "server.toml").checkpoints
    settle(three, checkpoints=tmp_path / "file" / "below")
    with pytest.raises(ProcessError) as error:
        three.run(lambda _: None)
    settle(three, checkpoints=before)
    assert str(error.value).startswith("stops: ")
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "Traceback" not in (three.work / "run.log").read_text()


def test_a_site_that_is_stopped_costs_one_deadline(three):
    """SIGSTOP after a round that it took part in; the node stays registered, and the others finish."""
    settle(three, patience=300.0, deadline=DEADLINE, ttl=600.0, quorum=2)
    three.start_site("site-2")
    stopped = []

    def tell(line):
        if "round 1/" in line and not stopped:
            stopped.append(line)
            os.killpg(three.running["site-1"].pid, signal.SIGSTOP)

    try:
        three.run(tell)
    finally:
        os.killpg(three.running["site-1"].pid, signal.SIGCONT)
    assert "3 of 3 accepted" in stopped[0]
    assert three.status() == "finished:completed"
    text = (three.folder / "server" / "state" / "audit.jsonl").read_text()
    audit = [json.loads(line) for line in text.splitlines()]
    fate = [x for x in audit if x.get("site") == "site-1" and x["what"] in ("mute", "rejected")]
    assert fate, "the log does not name the site"
    training = {t: [x for x in audit if x.get("round") == t and x.get("kind") == "train"] for t in range(1, ROUNDS + 1)}
    for t in range(2, ROUNDS + 1):
        last = max(moment(x) for x in training[t] if x["what"] == "accepted")
        missed = [x for x in audit if x["what"] == "missed" and x["round"] == t and x["site"] == "site-1"]
        most = 1 if t < ROUNDS else 2  # the last round also asks for scores, unless Flower no longer lists the node
        assert 1 <= len(missed) <= most, (t, missed)
        lost = (moment(missed[0]) - last).total_seconds()
        assert lost < (max(DEADLINE, REPORTED) if t == 2 else 0) + MOMENT, (t, lost)


def moment(entry):
    return datetime.fromisoformat(entry["time"])
