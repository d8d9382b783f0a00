"""Laws of virtual time. Each function raises an `AssertionError` with a sentence if a method violates its law.

The laws are checked in short runs with eight clients of different sizes, two features and three classes. A schedule
that rejects a method and states the reason does not violate the law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.algorithms import Algorithm, PresetMethod
from fedloom.data.federation import Federation
from fedloom.engine.result import Result
from fedloom.engine.setting import Setting
from fedloom.engine.simulate import simulate
from fedloom.engine.state import State
from fedloom.engine.virtual.clock import (
    BUSY_COLUMN,
    CLIENT_COLUMN,
    END_COLUMN,
    FATE_COLUMN,
    START_COLUMN,
    VERSION_COLUMN,
    Clock,
    ReplyOutcome,
    divide_client_time,
)
from fedloom.errors import Refused
from fedloom.local import LocalSGD
from fedloom.processes.clients import CLIENT_COUNTS
from fedloom.schedule import (
    FORWARD_COST,
    Buffered,
    Deadline,
    Devices,
    Equal,
    Fleet,
    LogNormal,
    OverSelection,
    Schedule,
    Synchronous,
)
from fedloom.seeds import numpy_generator
from fedloom.testing.scene import demand

N, LAW_ROUNDS = 8, 4
LAW_CLIENT_SIZES = (7, 4, 9, 5, 8, 3, 6, 10)
CLIENT_STATES_HINT = (
    "store values for later rounds in the states that init returns, and draw from work.rng and ctx.rng, not from "
    "global generators"
)
DOWNLOAD_HINT = "in `client`, use only the download, the rows and the work, and no attribute that other clients change"
WORK_HINT = "take samples, losses and gradients from work, which counts them"
NUMBERS_HINT = "in `client`, do not use the number of a client or its position in the cohort"
LOCAL_SETTINGS = LocalSGD(lr=0.1, batch_size="full", steps=2)


class Speeds(Devices):
    """Devices with given speeds, in training samples per second. A device with speed 0 never replies."""

    kind: ClassVar[str] = "speeds"
    speeds: tuple[float, ...]
    scale: float = 1.0

    def fleet(self, n: int, seed: int, rarity: Tensor) -> Fleet:
        """Return a fleet whose messages travel at 1e6 bytes per second without latency."""
        rate = torch.full((n,), 1e6 / self.scale, dtype=torch.float64)
        seconds = self.scale / torch.tensor(self.speeds, dtype=torch.float64)
        return Fleet(seconds, rate, rate, 0 * rate, ("all",), torch.zeros(n, dtype=torch.long))


def federation(order: Collection[int] = range(N), other: int | None = None) -> Federation:
    """Return the clients for checking laws, in the given order. The labels of client ``other`` are changed."""
    clients = []
    for i in order:
        g = numpy_generator(i, purpose="laws of time")
        y = (np.arange(LAW_CLIENT_SIZES[i]) + i) % 3
        x = (np.eye(3)[y] + 0.3 * g.standard_normal((len(y), 3)) + 0.1 * i).astype(np.float32)
        y = (y + 1) % 3 if i == other else y
        clients.append(((x, y), (x[:2], y[:2])))
    return Federation.create(clients, validation=0.0)


def run_rounds(
    method: Any, devices: Devices | None, schedule: Schedule, fed: Federation | None = None, **more: Any
) -> Result:
    """Run a method for a few rounds without evaluation.

    Raises:
        ConfigError: the method pools the clients' data, or the schedule does not support the method.
    """
    choices: dict[str, Any] = {"rounds": LAW_ROUNDS, "local": LOCAL_SETTINGS, "evaluate": {"every": 100}, **more}
    setting = Setting.create(method, devices=devices, schedule=schedule, local=LOCAL_SETTINGS)
    if setting.pooled:
        raise Refused("the pooled data of all clients have no clock")
    return simulate(method, federation() if fed is None else fed, devices=devices, schedule=schedule, **choices)


def get_clock(result: Result) -> Clock:
    """Return the clock of a run as it is at the end of the run."""
    assert result.state.clock is not None
    return result.state.clock


def same_models(one: Result, other: Result, sentence: str) -> None:
    """Raise an error if the states of the server or the clients are not bitwise equal in two runs."""
    pairs = [*zip(one.state.server, other.state.server, strict=True)]
    pairs += [*zip(*(result.job.clients.read(torch.arange(N)) for result in (one, other)), strict=True)]
    pairs += [*zip(*(result.job.kept.read(torch.arange(N)) for result in (one, other)), strict=True)]
    demand(all(torch.equal(a, b) for a, b in pairs), sentence)


def a_clock_changes_no_bit(method: object) -> None:
    """Check that a synchronous run produces the same models with and without devices."""
    same_models(
        run_rounds(method, None, Synchronous()),
        run_rounds(method, LogNormal(), Synchronous()),
        f"the models change if the run has devices; {CLIENT_STATES_HINT}",
    )


def whole_cohort(method: object) -> None:
    """Check that a run with equal devices and a buffer for the whole cohort is bitwise equal to a synchronous run.

    A run with a late deadline must also produce the same models as the synchronous run.
    """
    plain = run_rounds(method, None, Synchronous())
    for schedule in (Buffered(buffer=N), Deadline(seconds=1e9), OverSelection(factor=1)):
        same_models(
            plain,
            run_rounds(method, Equal(), schedule),
            f"{schedule!r} with equal devices differs from the synchronous run; {CLIENT_STATES_HINT}",
        )


def nothing_later(method: object) -> None:
    """Check that uploads do not depend on later events: changed labels must not affect earlier dispatches."""
    client, uploads_of_runs = 2, list[dict[tuple[int, int], Tensor]]()
    speeds = Speeds(speeds=(90.0, 50.0, 60.0, 70.0, 110.0, 40.0, 30.0, 60.0))
    first = math.inf
    for other in (None, client):
        uploads = dict[tuple[int, int], Tensor]()

        def note(state: State, uploads: dict[tuple[int, int], Tensor] = uploads) -> None:
            assert state.clock is not None
            for flight in state.clock.flights.values():
                rows = flight.rows(flight.places)
                parts = [v for k, v in flight.fields.items() if k.startswith(("upload.", "rows."))]
                for place, row in zip(flight.places.tolist(), rows.tolist(), strict=True):
                    kept = [part[row].double().flatten() for part in parts]
                    uploads[int(flight.ids[place]), flight.version] = torch.cat([torch.zeros(0), *kept])

        schedule = Buffered(buffer=2)
        result = run_rounds(method, speeds, schedule, federation(other=other), rounds=3 * LAW_ROUNDS, callbacks=[note])
        log = get_clock(result).history()
        first = min([first, *log[log[:, CLIENT_COLUMN] == client, 2].tolist()])
        uploads_of_runs.append(uploads)
    common = [k for k in uploads_of_runs[0].keys() & uploads_of_runs[1].keys() if k[0] != client and k[1] < first]
    demand(common and first < 3 * LAW_ROUNDS, "the run contains no upload for checking this law")
    demand(
        all(torch.equal(uploads_of_runs[0][k], uploads_of_runs[1][k]) for k in common),
        f"an upload depends on events after the client started to train; {DOWNLOAD_HINT}",
    )


def conservation(method: object) -> None:
    """Check that the busy, idle and absent seconds of each client add up to the total time.

    The numbers of samples and bytes, divided by their rates, must equal the client's busy seconds.
    """
    devices = Equal(speed=50, up=2e5, down=1e5, latency=0.25)
    result = run_rounds(method, devices, Synchronous())
    totals = dict(zip(CLIENT_COUNTS, result.state.totals.tolist(), strict=False))
    work = (totals["samples_backward"] + FORWARD_COST * totals["samples_forward"]) / 50
    log = get_clock(result).history()
    messages = 0.25 * len(log) * sum(totals[name] > 0 for name in ("bytes_up", "bytes_down"))
    want = work + totals["bytes_up"] / 2e5 + totals["bytes_down"] / 1e5 + messages
    busy = log[:, BUSY_COLUMN].sum()
    sentence = f"clients are busy for {busy} s, but their samples and bytes take {want} s"
    demand(math.isclose(busy, want, rel_tol=1e-9), f"{sentence}; {WORK_HINT}")
    for schedule in (Synchronous(), Deadline(seconds=1.0), OverSelection(factor=2), Buffered(buffer=2)):
        ended = run_rounds(method, LogNormal(present=0.5, period=1.5, latency=0.01), schedule)
        assert ended.job.fleet is not None
        clock, use = get_clock(ended), divide_client_time(get_clock(ended), ended.job.fleet)
        for name, part in (("busy", use.busy), ("idle", use.idle), ("absent", use.absent)):
            demand(bool((part > -1e-9).all()), f"{schedule!r}: a client has negative {name} seconds; {WORK_HINT}")
        log = clock.history()
        for i in range(N):
            client_log = log[log[:, CLIENT_COLUMN] == i]
            client_log = client_log[np.argsort(client_log[:, START_COLUMN])]
            demand(
                (client_log[1:, START_COLUMN] >= client_log[:-1, END_COLUMN] - 1e-9).all(),
                f"{schedule!r}: client {i} does two tasks at the same time; {WORK_HINT}",
            )


def permutation_of_devices(method: object) -> None:
    """Check that permuting clients together with their devices permutes the log, if all clients participate."""
    speeds, order = (90.0, 50.0, 20.0, 70.0, 110.0, 40.0, 30.0, 60.0), [3, 0, 7, 5, 1, 6, 2, 4]
    for schedule in (Synchronous(), OverSelection(factor=1.5), Buffered(buffer=3)):
        plain = get_clock(run_rounds(method, Speeds(speeds=speeds), schedule)).history()
        if isinstance(schedule, Synchronous) and len(plain) < N * LAW_ROUNDS:
            return  # samplers draw clients by number
        moved = Speeds(speeds=tuple(speeds[i] for i in order))
        other = get_clock(run_rounds(method, moved, schedule, federation(order))).history()
        other[:, CLIENT_COLUMN] = np.array(order)[other[:, CLIENT_COLUMN].astype(int)]
        one, two = (log[np.lexsort((log[:, CLIENT_COLUMN], log[:, VERSION_COLUMN]))] for log in (plain, other))
        alike = one.shape == two.shape and np.allclose(one, two, rtol=1e-9)
        demand(alike, f"{schedule!r}: permuting the clients changes their times; {NUMBERS_HINT}")


def scale_of_time(method: object) -> None:
    """Check that a run is exactly four times slower if devices, messages and deadlines are."""
    speeds = (90.0, 50.0, 20.0, 70.0, 110.0, 40.0, 30.0, 60.0)
    for make in (lambda c: Deadline(seconds=0.3 * c), lambda c: Buffered(buffer=3, timeout=0.5 * c)):
        one, four = (run_rounds(method, Speeds(speeds=speeds, scale=c), make(c)) for c in (1.0, 4.0))
        same_models(one, four, f"{make(1.0)!r}: slower devices change the models; {CLIENT_STATES_HINT}")
        demand(
            get_clock(four).now == 4 * get_clock(one).now,
            f"{make(1.0)!r}: devices that are four times slower do not take four times as long; {CLIENT_STATES_HINT}",
        )


def silence(method: object) -> None:
    """Check that a device that never replies occupies its slot until the timeout and does not affect other uploads."""
    other_speeds = (50.0, 80.0, 70.0, 110.0, 40.0, 50.0, 60.0)
    speeds, answering = (0.0, *other_speeds), Speeds(speeds=(50.0, *other_speeds))
    limit = 1.25 * float(get_clock(run_rounds(method, answering, Synchronous())).history()[:, BUSY_COLUMN].max())
    schedule = Buffered(buffer=2, timeout=limit)
    one, two = (run_rounds(method, Speeds(speeds=speeds), schedule, federation(other=o), rounds=40) for o in (None, 0))
    for a, b in zip(one.state.server, two.state.server, strict=True):
        demand(torch.equal(a, b), f"the samples of a device that never answers change the model; {DOWNLOAD_HINT}")
    log = get_clock(one).history()
    lost = log[log[:, FATE_COLUMN] == ReplyOutcome.LOST]
    demand(0 in lost[:, CLIENT_COLUMN], "a device that never answers is not recorded as lost")
    held = np.allclose(lost[:, END_COLUMN] - lost[:, START_COLUMN], limit)
    demand(held, "a device that never answers does not occupy its slot until the timeout")


TIME_LAWS: dict[str, Callable[[Any], None]] = {
    law.__name__: law
    for law in (
        a_clock_changes_no_bit, whole_cohort, nothing_later, conservation, permutation_of_devices, scale_of_time,
        silence,
    )
}  # fmt: skip
"""All laws of virtual time, keyed by name."""


def check_timing(method: Algorithm | PresetMethod | str, without: Collection[str] = ()) -> None:
    """Check that a method satisfies the laws of virtual time.

    Args:
        method: a method, or the name of a method.
        without: names of the laws that the method violates on purpose.

    Raises:
        AssertionError: a law is violated. The message names the first such law, the method, the difference and the
            usual fix.
    """
    for name, law in TIME_LAWS.items():
        if name in without:
            continue
        try:
            law(method)
        except Refused:
            continue
        except AssertionError as broken:
            raise AssertionError(f"law {name}, {method!r}: {broken}") from broken
