"""Processes never outlive what started them, however it ends."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from fedloom.errors import ConfigError
from fedloom_sites.deploy.ops import reaper
from fedloom_sites.deploy.ops.processes import ManagedProcess, ManagedProcesses, ProcessError, check_free, free_port

CHILD = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '2000']); print(p.pid, flush=True); time.sleep(2000)"
)
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(2000)"
)


def runs(pid):
    """Whether a process exists that is not only waiting to be buried."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pid, seconds=600):
    """Whether a process ends, long before it would by itself; it is the system's to bury what is not our own child."""
    end = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not runs(pid)


def output(process, seconds=600):
    end = time.monotonic() + seconds
    while not (text := process.log.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    return text


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_all_end_with_the_block_children_too(tmp_path, error):
    pids = []
    try:
        with ManagedProcesses() as processes:
            one = processes.start("one", [sys.executable, "-c", CHILD], {}, tmp_path / "one.log")
            two = processes.start("two", ["sleep", "2000"], {}, tmp_path / "two.log")
            pids += [one.pid, two.pid, int(output(one))]
            assert all(runs(pid) for pid in pids)
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt, SystemExit):
        assert error is not None
    assert all(gone(pid) for pid in pids)


def test_what_does_not_listen_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(reaper, "GROUP_GRACE_SECONDS", 0.3)
    with ManagedProcesses() as processes:
        one = processes.start("one", [sys.executable, "-c", STUBBORN], {}, tmp_path / "one.log")
        assert output(one)
    assert gone(one.pid)


def test_children_of_a_dead_process_end_as_well(tmp_path):
    with ManagedProcesses() as processes:
        one = processes.start("one", [sys.executable, "-c", CHILD], {}, tmp_path / "one.log")
        child = int(output(one))
        os.kill(one.pid, signal.SIGKILL)
        while one.alive():
            time.sleep(0.02)
        assert runs(child)
    assert gone(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_them(tmp_path, number):
    script = (
        "import signal, time; from pathlib import Path\n"
        "from fedloom_sites.deploy.ops.processes import ManagedProcesses\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "with ManagedProcesses() as p:\n"
        f"    one = p.start('one', ['sleep', '2000'], {{}}, Path({str(tmp_path / 'log')!r}))\n"
        "    print(one.pid, flush=True)\n    time.sleep(2000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        pid = int(launcher.stdout.readline())
        assert runs(pid)
        launcher.send_signal(number)
        assert launcher.wait(600) != 0
    assert gone(pid)


def test_the_reaper_ends_what_it_is_given_and_nothing_else(tmp_path):
    """What does not listen is killed, and what is not there any more is no error."""
    with ManagedProcesses() as processes:
        one = processes.start("one", [sys.executable, "-c", CHILD], {}, tmp_path / "one.log")
        two = processes.start("two", [sys.executable, "-c", STUBBORN], {}, tmp_path / "two.log")
        three = processes.start("three", ["sleep", "2000"], {}, tmp_path / "three.log")
        four = subprocess.Popen(["true"], start_new_session=True)
        four.wait()
        child, _ = int(output(one)), output(two)
        reaper.end_groups_at_close([f"{p.pid}\n" for p in (one, two, four)], grace=0.3)
        assert all(gone(pid) for pid in (one.pid, two.pid, child))
        assert runs(three.pid)


def test_an_id_that_another_process_may_have_is_signalled_by_nobody(tmp_path, monkeypatch):
    """The system gives the ID of a process that was reaped to a later process, of anybody."""
    signalled = []
    monkeypatch.setattr(reaper, "_signal_group", lambda group, _number: signalled.append(group))
    reaper.end_groups_at_close(["7\n", "8\n", "-7\n", "9\n", "-9\n", "9\n"])
    assert signalled == [9, 8]
    told = []
    monkeypatch.setattr(ManagedProcesses, "_tell_reaper", lambda _self, number: told.append(number))
    with ManagedProcesses() as processes:
        ended, reaped = (processes.start(name, ["true"], {}, tmp_path / f"{name}.log") for name in ("one", "two"))
        for process in (ended, reaped):  # otherwise `end` and `reap` would kill it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert processes.end(ended) == 0
        assert processes.started == [reaped]
        assert reaped.reap() == 0
    assert told == [ended.pid, reaped.pid, -ended.pid, -reaped.pid]


def test_no_reaper_stays(tmp_path):
    with ManagedProcesses() as processes:
        processes.start("one", ["sleep", "2000"], {}, tmp_path / "one.log")
        pid = processes._reaper.pid
        assert runs(pid)
    assert not runs(pid)


def test_without_its_reaper_the_block_ends_them_itself(tmp_path):
    with ManagedProcesses() as processes:
        one = processes.start("one", [sys.executable, "-c", CHILD], {}, tmp_path / "one.log")
        child = int(output(one))
        os.kill(processes._reaper.pid, signal.SIGKILL)
        two = processes.start("two", ["sleep", "2000"], {}, tmp_path / "two.log")
        assert runs(child)
    assert all(gone(pid) for pid in (one.pid, two.pid, child))


def test_the_end_comes_as_soon_as_they_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(reaper, "GROUP_GRACE_SECONDS", 600.0)
    before = time.monotonic()
    with ManagedProcesses() as processes:
        for name in ("one", "two", "three"):
            processes.start(name, ["sleep", "2000"], {}, tmp_path / f"{name}.log")
    assert time.monotonic() - before < reaper.GROUP_GRACE_SECONDS / 5


def test_one_that_ended_is_named_with_the_end_of_its_output(tmp_path):
    with ManagedProcesses() as processes:
        one = processes.start("server", ["sh", "-c", "echo the disk is full; exit 3"], {}, tmp_path / "server.log")
        while one.alive():
            time.sleep(0.01)
        with pytest.raises(ProcessError, match=r"server ended with exit status 3[^$]*the disk is full"):
            processes.check()


def test_environment_is_added(tmp_path):
    with ManagedProcesses() as processes:
        one = processes.start("one", ["sh", "-c", "echo $FL-$HOME"], {"FL": "x"}, tmp_path / "log")
        assert output(one).strip() == f"x-{os.environ['HOME']}"


def test_ports():
    assert len({free_port() for _ in range(200)}) == 200  # the system alone would repeat one of so many
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: port {port} on 127.0.0.1 is not free"):
            check_free(port, "--port")
    check_free(port, "--port")


def test_a_port_that_was_taken_meanwhile_is_named_with_the_cure(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        bind = f"import socket; socket.create_server(('127.0.0.1', {port}))"
        process = ManagedProcess("superlink", [sys.executable, "-c", bind], {}, tmp_path / "log")
        while process.alive():
            time.sleep(0.02)
    with pytest.raises(
        ProcessError, match=r"superlink ended .*\nanother program has taken the chosen port .* command again$"
    ):
        process.check()
