from __future__ import annotations

import errno
import fcntl
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import fedloom
from fedloom.errors import CheckpointError, RunDirError
from fedloom.storage import disk, files, locks

SOURCE = str(Path(fedloom.__file__).parents[1])


class Crash(BaseException):
    pass


@pytest.fixture(autouse=True)
def _no_hook():
    yield
    disk.hook = None


def stop_at(step, error=Crash):
    """From the step-th primitive on, nothing reaches the disk; `stops.ops` are the names of all primitives."""

    def stops(op, path):
        stops.ops.append(op)
        if len(stops.ops) >= step:
            raise error()

    stops.ops = []
    disk.hook = stops
    return stops


def full(from_step):
    """A disk that is full from a step on: what is there can be deleted, cut and renamed."""

    def hook(op, path):
        hook.step += 1
        if hook.step >= from_step and op in {"create", "write", "tear", "fsync"}:
            raise OSError(errno.ENOSPC, "No space left on device")

    hook.step = 0
    disk.hook = hook
    return hook


def python(code, *arguments, **environment):
    env = {**os.environ, "PYTHONPATH": SOURCE, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=env, stdout=subprocess.PIPE, text=True
    )


def test_write_atomic_replaces_the_whole_file(tmp_path):
    path = tmp_path / "a.json"
    files.write_atomic(path, b"one, and longer")
    files.write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    files.write_atomic(path, lambda file: [file.write(b"th"), file.write(memoryview(b"ree"))])
    assert path.read_bytes() == b"three"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_write_atomic_serves_libraries_that_write_to_a_file(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"round": list(range(1000)), "value": [0.5] * 1000})
    files.write_atomic(tmp_path / "m.parquet", lambda file: pq.write_table(table, file))
    assert pq.read_table(tmp_path / "m.parquet").equals(table)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_second_writer_of_a_file_waits_for_the_first_and_its_content_is_whole(tmp_path, error):
    path = tmp_path / "a"
    second = threading.Thread(target=files.write_atomic, args=(path, b"second"))

    def writer(file):
        file.write(b"the content of ")
        second.start()
        second.join(0.2)
        if error is not None:
            raise error
        file.write(b"the first")

    with nullcontext() if error is None else pytest.raises(error):
        files.write_atomic(path, writer)
    second.join()
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"second")]


def test_write_atomic_ends_on_a_disk_that_numbers_files_anew_at_every_look(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "samestat", lambda one, two: False)
    files.write_atomic(tmp_path / "file", b"old")
    files.write_atomic(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_write_atomic_syncs_before_the_rename_and_the_folder_after_it(tmp_path):
    seen = []
    disk.hook = lambda op, path: seen.append((op, path.name))
    files.write_atomic(tmp_path / "a", b"content")
    temporary = ".a.tmp"
    assert seen == [
        ("create", temporary),
        ("write", temporary),
        ("tear", temporary),
        ("fsync", temporary),
        ("rename", "a"),
        ("fsync", tmp_path.name),
    ]


@pytest.mark.parametrize("step", range(1, 7))
def test_killed_at_any_step_the_file_is_old_or_new(tmp_path, step):
    path = tmp_path / "a"
    files.write_atomic(path, b"old content")
    stop_at(step)
    with pytest.raises(Crash):
        files.write_atomic(path, b"new")
    disk.hook = None
    assert path.read_bytes() == (b"new" if step == 6 else b"old content")
    files.write_atomic(path, b"newer")
    assert [p.name for p in tmp_path.iterdir()] == ["a"], "the next write takes the temporary name over"


@pytest.mark.parametrize("step", range(1, 5))
def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path, step):
    path = tmp_path / "a"
    files.write_atomic(path, b"old content")
    full(step)
    with pytest.raises(CheckpointError, match=r"a could not be written: the disk is full\. .*\. Free some space"):
        files.write_atomic(path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old content")]


def test_a_writer_that_fails_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "a"
    files.write_atomic(path, b"old content")

    def writer(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(path, writer)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old content")]


@pytest.fixture
def largest_file():
    """The system itself refuses the bytes of a file beyond 5,000."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.usefixtures("largest_file")
def test_a_write_that_the_system_cuts_short_is_an_error(tmp_path):
    files.write_atomic(tmp_path / "a", b"old")
    with pytest.raises(CheckpointError, match=r"File too large\. .*\. Check the disk"):
        files.write_atomic(tmp_path / "a", bytes(9000))
    assert files.append_synced(tmp_path / "a", [b"er"]) == 5
    with pytest.raises(CheckpointError):
        files.append_synced(tmp_path / "a", [b"x", bytes(9000)])
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"older")]


def test_append_adds_at_the_end_with_one_sync(tmp_path):
    path = tmp_path / "log"
    files.write_atomic(path, b"ab")
    ops = stop_at(1000).ops
    assert files.append_synced(path, [b"cd", b"", b"efg"]) == 7
    assert path.read_bytes() == b"abcdefg"
    assert ops.count("fsync") == 1
    assert ops[-1] == "fsync"


@pytest.mark.parametrize("step", range(1, 6))
def test_an_append_on_a_full_disk_is_taken_back(tmp_path, step):
    path = tmp_path / "log"
    files.write_atomic(path, b"ab")
    full(step)
    with pytest.raises(CheckpointError, match="the disk is full"):
        files.append_synced(path, [b"cdef", b"ghij"])
    assert path.read_bytes() == b"ab"


def test_discard_syncs_the_folder_between_files(tmp_path):
    a, b, none = (tmp_path / name for name in ("a", "b", "none"))
    for path in (a, b):
        files.write_atomic(path, b"")
    stops = stop_at(3)
    with pytest.raises(Crash):
        files.delete_files(a, none, b)
    assert stops.ops == ["unlink", "fsync", "unlink"]
    disk.hook = None
    files.delete_files(a, none, b)
    assert list(tmp_path.iterdir()) == []


def test_make_folder_makes_parents_once(tmp_path):
    ops = stop_at(1000).ops
    files.make_folder(tmp_path / "a" / "b")
    assert ops == ["create", "fsync", "create", "fsync"]
    files.make_folder(tmp_path / "a" / "b")
    assert len(ops) == 4
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("look", range(1, 9))
def test_make_folder_takes_a_folder_that_another_process_makes_or_deletes_meanwhile(tmp_path, monkeypatch, look):
    folder, looks, stat = tmp_path / "live", itertools.count(1), os.stat

    def meanwhile(path, *args, **options):
        if Path(path) == folder and next(looks) == look:
            folder.rmdir() if folder.exists() else folder.mkdir()
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", meanwhile)
    for _ in range(2):
        files.make_folder(folder)


def test_an_unwritable_place_is_a_sentence(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunDirError, match="file is a file, not a folder"):
        files.make_folder(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="could not be written: No such file"):
        files.write_atomic(tmp_path / "none" / "a", b"")
    with pytest.raises(CheckpointError, match="could not be written: File name too long"):
        files.write_atomic(tmp_path / ("a" * 300), b"")
    for folder in (tmp_path, Path()):
        with pytest.raises(CheckpointError, match=r"is a folder, not a file. Give the path of a file, such as .*NAME"):
            files.write_atomic(folder, b"")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    path = tmp_path / "log"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        files.append_synced(path, [b"x"])
    files.write_atomic(path, b"x")
    assert path.read_bytes() == b"x"
    os.mkfifo(tmp_path / ".log.tmp")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        files.write_atomic(path, b"y")
    files.write_atomic(path, b"y")
    assert path.read_bytes() == b"y"
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(CheckpointError, match="is not a regular file"), locks.lock(tmp_path):
        pass


def test_a_row_file_is_read_and_written_in_place(tmp_path):
    file = files.RowFile(tmp_path / "rows", 1 << 20, new=True)
    file.write([([memoryview(b"ab"), memoryview(b"c")], 1000)])
    file.sync()
    into = bytearray(5)
    file.read([memoryview(into)[:2], memoryview(into)[2:]], 999)
    assert bytes(into) == b"\0abc\0"
    file.close()
    again = files.RowFile(tmp_path / "rows", 1 << 20, new=False)
    again.read([memoryview(into)], 1000)
    assert bytes(into) == b"abc\0\0"
    with pytest.raises(CheckpointError, match="truncated: it ends before"):
        again.read([memoryview(bytearray(10))], (1 << 20) - 5)
    with pytest.raises(CheckpointError, match="is shorter than 7 bytes"):
        files.RowFile(tmp_path / "rows", 7, new=False)
    with pytest.raises(CheckpointError, match="missing"):
        files.RowFile(tmp_path / "none", 7, new=False)


@pytest.mark.parametrize(
    "refusal", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF], ids=errno.errorcode.get
)
def test_a_disk_without_file_locks_is_named_wherever_a_lock_is_taken(refusal, tmp_path, monkeypatch):
    """Several machines could write there at once, so nothing is written; a file is still replaced as a whole."""

    def refuse(fd, operation):
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run, site = tmp_path / "run", tmp_path / "site.toml"
    site.write_text("")
    places = [(run / ".lock", lambda: locks.lock(run).__enter__())]
    if find_spec("fedloom_studies") is not None:
        store = import_module("fedloom_studies.store")
        places.append((tmp_path, lambda: store.lock_folder(tmp_path).__enter__()))
    if find_spec("fedloom_sites") is not None:
        handover = import_module("fedloom_sites.deploy.site.handover")
        state = tmp_path / "state"
        places.append((state / "warm.lock", handover._ProcessStart(site, state, os.getpid()).attempt))
    for place, take in places:
        with pytest.raises(RunDirError, match=f"^{place} cannot be locked .*not support file locks.*on a local disk"):
            take()
    assert not locks.is_in_use(run)
    files.write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_every_lock_is_taken_by_the_one_function_that_knows_such_disks():
    root = Path(fedloom.__file__).parents[1]
    owners = {path.name for path in root.rglob("*.py") if "flock(" in path.read_text()}
    assert owners == {"locks.py", "files.py"}


HOLD = """
import sys, time
from pathlib import Path
from fedloom.storage.locks import lock
with lock(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(2000)
"""

HOLD_WITH_WORKER = """
import os, sys, time
from pathlib import Path
from fedloom.storage.locks import lock
with lock(Path(sys.argv[1])):
    worker = os.fork()
    if worker == 0:
        time.sleep(2000)
    print(worker, flush=True)
    time.sleep(2000)
"""


def test_the_lock_keeps_a_second_process_out_and_dies_with_the_first(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "a"
    with python(HOLD, run) as first:
        assert first.stdout.readline() == "in\n"
        assert locks.is_in_use(run)
        with (
            pytest.raises(RunDirError, match=rf"a is in use by process {first.pid} on .*wait for it, or choose"),
            locks.lock(run),
        ):
            pass
        first.kill()
        first.wait()
        (run / ".lock").write_text(f"{os.getpid()} {os.uname().nodename}")  # its number is another's now
        assert not locks.is_in_use(run)
        monkeypatch.setattr(locks.time, "sleep", lambda _seconds: pytest.fail("it waited"))
        with locks.lock(run), pytest.raises(RunDirError), locks.lock(run):
            pass
        with locks.lock(run):
            pass


def test_who_only_looks_whether_a_directory_is_in_use_keeps_nobody_out(tmp_path, monkeypatch):
    """However long the look takes; the file names this process, which has worked there before."""
    with locks.lock(tmp_path):
        pass
    look, looks = os.open(tmp_path / ".lock", os.O_RDONLY), []
    fcntl.flock(look, fcntl.LOCK_SH)

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 5:
            os.close(look)

    monkeypatch.setattr(locks.time, "sleep", sleep)
    with locks.lock(tmp_path):
        assert len(looks) == 5


def test_a_surviving_worker_of_a_dead_process_still_holds_the_lock(tmp_path):
    with python(HOLD_WITH_WORKER, tmp_path) as first:
        worker = int(first.stdout.readline())
        first.kill()
        first.wait()
        try:
            with (
                pytest.raises(RunDirError, match="which has ended, but some of its workers"),
                locks.lock(tmp_path, 0.1),
            ):
                pass
        finally:
            os.kill(worker, signal.SIGKILL)
        with locks.lock(tmp_path):
            pass


WRITE = """
import sys
from pathlib import Path
from fedloom.storage.files import write_atomic
for content in (b"one", b"two", b"six"):
    write_atomic(Path(sys.argv[1]) / "a", content)
"""


@pytest.mark.parametrize(("step", "content"), [(7, b"one"), (11, b"one"), (12, b"two"), (18, b"six")])
def test_the_environment_kills_at_a_step(tmp_path, step, content):
    with python(WRITE, tmp_path, FEDLOOM_CRASH_AT=str(step)) as process:
        assert process.wait() == 137
    assert (tmp_path / "a").read_bytes() == content
