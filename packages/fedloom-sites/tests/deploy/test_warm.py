"""The site's process that stays: one however many ask, of one experiment, gone with its owner, no loss when killed."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from fedloom.errors import ConfigError, Stop
from fedloom.storage.locks import take_lock
from fedloom_sites.deploy.setting_files import settings_text
from fedloom_sites.deploy.site import handover
from fedloom_sites.deploy.site.handover import (
    HANDOVER_MAGIC,
    SITE_LOG_FILE,
    SOCKET_LOCK_FILE,
    NoAnswer,
    hand_over,
    settings_digest,
    socket_path,
    state_folder,
)
from fedloom_sites.deploy.site.pinned import SECRET_OPTION
from tests.deploy.scene import FIRST, scene
from tests.deploy.test_processes import gone, runs

SMALL = {"rounds": 2, "partition": {"kind": "iid", "clients": 2, "max_train_per_client": 60}}
SLEEP = [sys.executable, "-c", "import time; time.sleep(3000)"]


@pytest.fixture
def owner():
    """A process that the sites' processes end with."""
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def files(here):
    found = []
    for site in here.sites:
        path = site.state / "site.toml"
        path.write_text(settings_text(site))
        found.append(path)
    return found


def node(file, owner):
    """A node whose app hands messages over."""

    def answer(message):
        content = recorddict_to_proto(message.content).SerializeToString()
        reply = hand_over(file, content, owner.pid)
        return Message(recorddict_from_proto(ProtoRecordDict.FromString(reply)), reply_to=message)

    return answer


def grid(here, owner, fault=None):
    made = here.grid(fault)
    made.nodes = {FIRST + k: node(file, owner) for k, file in enumerate(files(here))}
    return made


def processes(file):
    """The site's processes that live."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if "fedloom_sites.deploy.site.warm" in words and str(file) in words and runs(int(entry)):
            found.append(int(entry))
    return found


def waited(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def hello(here, k=0):
    """The content of a greeting, as the server sends it."""
    sent = []
    quiet = here.grid(lambda *_: None)
    here.serve(quiet, quorum=1, patience=0.1)
    sent += [m for m in quiet.sent if m.metadata.dst_node_id == FIRST + k]
    return recorddict_to_proto(sent[0].content).SerializeToString()


def head(reply):
    return recorddict_from_proto(ProtoRecordDict.FromString(reply))["head"]


def test_the_same_bits_from_one_process_per_site_also_after_kills(tmp_path, owner):
    plain = scene(tmp_path / "plain", "flame", **SMALL)
    assert plain.serve() is Stop.DONE
    here = scene(tmp_path / "warm", "flame", **SMALL)
    seen = set()

    def fault(number, message, reply):
        [pid] = processes(files_of[number - FIRST])
        seen.add(pid)
        if message.content["head"]["round"] == 1 and message.content["head"]["kind"] != "score":
            os.kill(pid, signal.SIGKILL)  # after its reply has left
            assert gone(pid)
        return reply

    warm = grid(here, owner, fault)
    files_of = [site.state / "site.toml" for site in here.sites]
    assert here.serve(warm) is Stop.DONE
    assert len(seen) == 4
    assert torch.equal(here.model(), plain.model())
    for mine, other in zip(here.sites, plain.sites, strict=True):
        states = [next(s.state.glob("*/model.safetensors")).read_bytes() for s in (mine, other)]
        assert states[0] == states[1]


def test_a_process_that_dies_while_it_answers_is_an_error_at_once_and_is_started_anew(tmp_path, owner, monkeypatch):
    """At once: in a small part of what it may take, here five hours."""
    monkeypatch.setattr(handover, "START_SECONDS", 18000.0)
    here = scene(tmp_path, "fedavg", **SMALL)
    content, file = hello(here), files(here)[0]
    assert head(hand_over(file, content, owner.pid))["status"] == "ok"
    [first] = processes(file)
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(hand_over, file, content, owner.pid)
        time.sleep(0.3)
        os.kill(first, signal.SIGKILL)  # it has taken nothing yet: another one answers
        assert head(asked.result(600))["status"] == "ok"
    [second] = processes(file)
    assert second != first
    spare = socket_path(state_folder(file)).with_name("taker.sock")  # on the disk where it will lie
    listener = _taker(spare, settings_digest(file))
    os.kill(second, signal.SIGKILL)
    assert gone(second)
    socket_path(state_folder(file)).unlink()
    spare.rename(socket_path(state_folder(file)))
    start = time.monotonic()
    with pytest.raises(NoAnswer, match="ended before it answered"):
        hand_over(file, content, owner.pid)
    assert time.monotonic() - start < handover.START_SECONDS / 30
    listener.result()
    assert head(hand_over(file, content, owner.pid))["status"] == "ok"
    [third] = processes(file)
    assert third != second


def _taker(path, key):
    """Takes one message and dies."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)

    def take():
        line, _ = listener.accept()
        assert line.recv(len(HANDOVER_MAGIC) + len(key)) == HANDOVER_MAGIC + key
        line.sendall(handover.SAME_SITE_REPLY)
        line.recv(8)
        line.close()
        listener.close()

    pool = ThreadPoolExecutor(1)
    return pool.submit(take)


def test_messages_that_race_get_one_process(tmp_path, owner):
    here = scene(tmp_path, "fedavg", **SMALL)
    content, file = hello(here), files(here)[0]
    script = (
        "import sys; from pathlib import Path; from fedloom_sites.deploy.site.handover import hand_over; "
        "hand_over(Path(sys.argv[1]), sys.stdin.buffer.read(), int(sys.argv[2]))"
    )
    words = [sys.executable, "-c", script, str(file), str(owner.pid)]
    racing = [subprocess.Popen(words, stdin=subprocess.PIPE) for _ in range(4)]
    for one in racing:
        one.stdin.write(content)
        one.stdin.close()
    assert [one.wait(600) for one in racing] == [0] * 4
    assert len(processes(file)) == 1
    assert (state_folder(file) / SITE_LOG_FILE).read_text() == ""


def test_it_ends_with_its_owner_and_with_other_settings(tmp_path, owner):
    here = scene(tmp_path, "fedavg", **SMALL)
    content, file = hello(here), files(here)[0]
    hand_over(file, content, owner.pid)
    [first] = processes(file)
    file.write_text(settings_text(here.sites[0].with_(free_disk=7)))
    assert head(hand_over(file, content, owner.pid))["status"] == "ok"
    [second] = processes(file)
    assert second != first
    owner.kill()
    owner.wait()
    assert gone(second)
    with open(state_folder(file) / SOCKET_LOCK_FILE) as lock:
        assert waited(lambda: take_lock(lock.fileno(), state_folder(file) / SOCKET_LOCK_FILE))


def test_another_version_has_another_key(tmp_path, monkeypatch):
    """By which both sides see that they are of one version, and of one file of settings."""
    file = files(scene(tmp_path, "fedavg", **SMALL))[0]
    before = settings_digest(file)
    monkeypatch.setattr(handover, "__version__", "9.9.9")
    assert settings_digest(file) != before


@pytest.mark.slow
def test_it_ends_with_other_settings_though_no_message_comes(tmp_path, owner):
    here = scene(tmp_path, "fedavg", **SMALL)
    content, file = hello(here), files(here)[0]
    hand_over(file, content, owner.pid)
    [first] = processes(file)
    file.write_text(settings_text(here.sites[0].with_(free_disk=7)))
    assert gone(first)


def test_a_sites_command_starts_its_process_and_becomes_the_nodes(tmp_path):
    """The process is there before any message, and ends with the command."""
    here = scene(tmp_path, "fedavg", **SMALL)
    content, file = hello(here), files(here)[0]
    words = [sys.executable, "-P", "-m", handover.__name__, str(file), *SLEEP]
    with subprocess.Popen(words) as node:
        assert waited(lambda: processes(file))
        [first] = processes(file)
        assert head(hand_over(file, content, node.pid))["status"] == "ok"
        assert processes(file) == [first]
        node.kill()
        node.wait()
        assert gone(first)


def test_a_node_begins_though_its_settings_are_wrong(tmp_path):
    """What is wrong is said to the first message."""
    words = [
        sys.executable,
        "-P",
        "-m",
        handover.__name__,
        str(tmp_path / "none.toml"),
        sys.executable,
        "-c",
        "print(7)",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"
    assert done.stderr.startswith("fedloom: cannot read the site file")


@pytest.mark.parametrize("fault", ["settings", "state"])
def test_a_node_that_cannot_start_ends_with_a_sentence(tmp_path, fault):
    """Its tasks' secret cannot be written; the unit repeats the start until the disk is repaired."""
    file = tmp_path / "none.toml"
    if fault == "state":
        file = files(scene(tmp_path, "fedavg", **SMALL))[0]
        shutil.rmtree(state_folder(file), ignore_errors=True)
        state_folder(file).write_text("no folder")
    words = [sys.executable, "-P", "-m", handover.__name__, str(file), "flower-supernode", "--port", "1"]
    secret = state_folder(file) / "secret" if fault == "state" else "secret"
    done = subprocess.run([*words, SECRET_OPTION, str(secret)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    what = "cannot write" if fault == "state" else "cannot read the site file"
    assert done.stderr.splitlines()[-1].startswith(f"fedloom: {what}")


def test_what_changed_on_the_disk_is_read_anew(tmp_path, owner):
    """A change of the data at equal number is told, as by a process per message."""
    here = scene(tmp_path, "fedavg", **SMALL)
    data = tmp_path / "own.csv"
    rows = [f"{i % 7},{i % 5},{i % 2}\n" for i in range(60)]
    data.write_text("a,b,y\n" + "".join(rows))
    table = {"source": "csv", "path": str(data), "target": "y"}
    here = scene(tmp_path / "table", "fedavg", **{**SMALL, "data": table})
    site = here.sites[0].with_(data=table, share="all", fixed_data=True, state=tmp_path / "own")
    content, file = hello(here), tmp_path / "site.toml"
    file.write_text(settings_text(site))
    assert head(hand_over(file, content, owner.pid))["status"] == "ok"
    pids = processes(file)
    data.write_text("a,b,y\n" + "".join(reversed(rows)))
    refused = head(hand_over(file, content, owner.pid))
    assert "differ from those at the start" in refused["reason"]
    data.write_text("a,b,y\n" + "".join(rows))
    assert head(hand_over(file, content, owner.pid))["status"] == "ok"
    assert processes(file) == pids


def test_only_whole_messages_within_the_limit_from_this_user(tmp_path, owner, monkeypatch):
    here = scene(tmp_path, "fedavg", **SMALL)
    content, file = hello(here), files(here)[0]
    hand_over(file, content, owner.pid)
    path = socket_path(state_folder(file))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for sent in (
        b"",
        b"nonsense" * 8,
        HANDOVER_MAGIC + settings_digest(file)[:5],
        HANDOVER_MAGIC + settings_digest(file) + (99).to_bytes(8, "big") + b"x",
    ):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(path))
            line.sendall(sent)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))
        line.sendall(HANDOVER_MAGIC + settings_digest(file) + (1 << 62).to_bytes(8, "big"))
        assert handover.receive_bytes(line, 2) == handover.SAME_SITE_REPLY + handover.ERROR_REPLY
        assert b"at most" in handover.receive_sized(line)
    assert head(hand_over(file, content, owner.pid))["status"] == "ok"
    assert len(processes(file)) == 1
    monkeypatch.setattr(handover, "is_own_message", lambda _line: False)
    with pytest.raises(ConfigError, match="another user"):
        hand_over(file, content, owner.pid)


def test_the_peer_is_known_by_its_user(monkeypatch):
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert handover.is_own_message(one)
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        assert not handover.is_own_message(one)


def test_a_path_that_is_too_long_gets_a_short_private_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    state = tmp_path / ("deep" * 20) / ("deeper" * 10)
    state.mkdir(parents=True)
    path = socket_path(state)
    assert path.parent.parent == tmp_path
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="not be writable by others"):
        socket_path(state)
    path.parent.rmdir()
    path.parent.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not be writable by others"):
        socket_path(state)


def test_the_app_that_flower_starts_imports_no_torch():
    script = (
        "import sys, flwr.clientapp, fedloom_sites.deploy.apps; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'fedloom_sites.deploy.site.client', 'pyarrow', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_process_that_cannot_start_is_an_error_that_names_the_log(tmp_path, owner, monkeypatch):
    here = scene(tmp_path, "fedavg", **SMALL)
    content, file = hello(here), files(here)[0]
    file.write_text("no_such_setting = 1\n" + file.read_text())
    monkeypatch.setattr(handover, "START_SECONDS", 1.0)
    with pytest.raises(NoAnswer, match=SITE_LOG_FILE):
        hand_over(file, content, owner.pid)
    assert waited(lambda: "no_such_setting" in (state_folder(file) / SITE_LOG_FILE).read_text())


def test_a_message_names_the_process_that_all_of_a_site_end_with(monkeypatch):
    """Its parent may have died: the process that takes children over then never ends."""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert handover._owner_process_id() == os.getpid()
    monkeypatch.setattr(os, "getppid", lambda: 77)
    assert handover._owner_process_id() == 77
    monkeypatch.setenv(handover.OWNER_VARIABLE, "1")  # in a container it is the first process itself
    assert handover._owner_process_id() == 1
