"""Measure secure aggregation: the additional cost of a masked round, and the cost of the protocol alone.

    python benchmarks/secure.py [--sites 5 9] [--d 10000 1000000] [--pairs 5] [--rounds 4]
    python benchmarks/secure.py --verify [--sites 5] [--d 10000 1000000] [--pairs 3]
    python benchmarks/secure.py --protocol [--sites 5 20 100] [--d 100000] [--lost 0.1]
    python benchmarks/secure.py --protections [--sites 5 9] [--d 10000 1000000]

The first command runs whole deployments in this process, including the server and all sites, alternately without and
with masks. Every message is serialized and parsed again. The printed times are the processor times of the server and
all sites in a round, without the first round, in which the sites register. Each value is the median over pairs of
deployments, followed by the minimum and the maximum.

With --verify, all runs are masked, and the runs in which sites verify the server are compared with runs in which they
do not. The last column shows the time in which one site computes the sum of a round and repeats the server's step.

With --protocol, neither training nor messages are included. The threshold is the default one. A fraction of the sites
drops out after the shares were sent, so the server restores the masking keys of these sites. The time of a site is the
mean over sites.

With --protections, every operation that protects against a dishonest server or dishonest sites is timed individually.
The time is multiplied by the number of such operations in a round.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "packages/fedloom-sites"))  # for the tests' helpers

from flwr.app import Message
from flwr.common.serde import message_to_proto

from fedloom.errors import Stop
from fedloom_sites.deploy.audit import Audit
from fedloom_sites.deploy.replay import ModelReplay
from fedloom_sites.deploy.secure import integers, shares
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.opened import OpenedSums
from fedloom_sites.deploy.server.run import serve_run
from fedloom_sites.deploy.site.state import SiteState
from tests.deploy import grid
from tests.deploy.scene import scene
from tests.deploy.sessions import secured

UNIT_PARAMETERS = 75
"""Number of parameters per hidden unit of a model for the digits. The output layer has ten additional parameters."""


class Round(NamedTuple):
    """Cost of a round in a deployment: processor seconds and bytes of the server and all sites, and replay seconds."""

    seconds: float
    bytes: float
    replay: float = 0.0


def measure_deployment(masked: bool, sites: int, d: int, rounds: int, *, verify: bool = False) -> Round:
    """Run one deployment, and return the median cost of its rounds."""
    sent, ends, wire = [0], list[tuple[float, int]](), grid.wire
    replays, add = list[float](), ModelReplay.add

    def timed(*parts: Any) -> bytes:
        start = time.process_time()
        link = add(*parts)
        replays.append(time.process_time() - start)
        return link

    def counted(message: Message) -> Message:
        sent[0] += len(message_to_proto(message).SerializeToString())
        return wire(message)

    def note(line: str) -> None:
        if "round " in line:
            ends.append((time.process_time(), sent[0]))

    changes: dict[str, Any] = {
        "rounds": rounds,
        "partition": {"kind": "iid", "clients": sites, "max_train_per_client": 24},
        "model": {"kind": "mlp", "hidden": [round(d / UNIT_PARAMETERS)]},
        "engine": {"dtype": "float32"},
        "evaluate": {"every": 10 * rounds},
    }
    with tempfile.TemporaryDirectory() as folder:
        threshold: dict[str, Any] = {"threshold": secure.safe_threshold(sites)} if masked else {}
        threshold |= {"agreed": {"verify": True}} if verify else {}
        here = (secured if masked else scene)(Path(folder), "fedavg", **threshold, **changes)
        grid.wire, ModelReplay.add = counted, timed  # type: ignore[method-assign]
        try:
            assert serve_run(here.grid(), here.server.with_(deadline=600.0, ttl=600.0), note) is Stop.DONE
        finally:
            grid.wire, ModelReplay.add = wire, add  # type: ignore[method-assign]
    costs = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends)]
    return Round(*(median(numbers) for numbers in zip(*costs, strict=True)), median(replays or [0.0]))


def compare_rounds(sites: int, d: int, pairs: int, rounds: int, *, verify: bool = False) -> str:
    """Format a line that compares rounds with and without masks, or masked rounds with and without verification."""
    plain, masked = [list(both) for both in zip(*(
        (measure_deployment(verify, sites, d, rounds), measure_deployment(True, sites, d, rounds, verify=verify))
        for _ in range(pairs)
    ), strict=True)]  # fmt: skip

    def spread(numbers: list[float], digits: int = 3) -> str:
        return f"{median(numbers):.{digits}f} ({min(numbers):.{digits}f}-{max(numbers):.{digits}f})"

    ratio = [m.seconds / p.seconds for p, m in zip(plain, masked, strict=True)]
    size = f"{plain[0].bytes / 1e6:9.3f} {masked[0].bytes / 1e6:9.3f}"
    seconds = f"{spread([p.seconds for p in plain]):>21} {spread([m.seconds for m in masked]):>21}"
    replay = f" | {median([m.replay for m in masked]):.3f}" if verify else ""
    return f"{sites:5} {d:9,} | {size} | {seconds} | {spread(ratio, 2)}{replay}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+")
    parser.add_argument("--d", type=int, nargs="+", help="number of values in an upload")
    parser.add_argument("--pairs", type=int, default=5, help="number of deployments of each kind")
    parser.add_argument("--rounds", type=int, default=4, help="rounds per deployment, including the first")
    parser.add_argument("--verify", action="store_true", help="compare masked rounds with and without verification")
    parser.add_argument("--protocol", action="store_true", help="measure the protocol alone")
    parser.add_argument("--protections", action="store_true", help="measure the operations of the protections")
    parser.add_argument("--lost", type=float, default=0.1, help="fraction of the sites that drops out")
    given = parser.parse_args()
    if given.protocol:
        print("sites         d lost threshold | MB up per site  MB down per site | site s  server s")
        for d in given.d or [100_000]:
            for n in given.sites or [5, 20, 100]:
                print(f"{n:5} {d:9,} " + measure_protocol(n, d, int(given.lost * n)), flush=True)
        return
    if given.protections:
        for d in given.d or [10_000, 1_000_000]:
            for n in given.sites or [5, 9]:
                print(f"{n} sites, {d:,} parameters: processor ms of a round")
                for what, seconds in measure_protections(n, d).items():
                    print(f"{1e3 * seconds:7.1f}  {what}", flush=True)
        return
    print(f"a round of the server and all sites: median of {given.pairs} pairs (least-most)")
    one, other = ("masked", "verified") if given.verify else ("plain", "masked")
    seconds = f"{f's {one}':>21} {f's {other}':>21} | {other} / {one}"
    print(f"sites {'d':>9} | {f'MB {one}':>9} {f'MB {other}':>9} | {seconds}{' | replay s' if given.verify else ''}")
    for d in given.d or [10_000, 1_000_000]:
        for n in given.sites or [5, 9]:
            print(compare_rounds(n, d, given.pairs, given.rounds, verify=given.verify), flush=True)


def measure_protocol(n: int, d: int, lost: int) -> str:
    """Run the protocol once among ``n`` sites, and format a line with its bytes and times."""
    name, threshold, rng = bytes(32), secure.safe_threshold(n), np.random.default_rng(0)
    signing = [Ed25519PrivateKey.generate() for _ in range(n)]
    public = {c: key.public_key() for c, key in enumerate(signing)}
    start = time.process_time()
    secrets = [secure.new_secrets() for _ in range(n)]
    adverts = [secure.make_advert(name, c, secrets[c], signing[c]) for c in range(n)]
    session = secure.build_session(name, threshold, adverts)
    for _ in range(n):
        secure.check_adverts(name, adverts, public)
    sent = [shares.make_shares(session, c, secrets[c], signing[c]) for c in range(n)]

    def opened(c: int, p: int) -> bytes:
        return sent[p][c] if p == c else shares.open_share(session, c, secrets[c], p, sent[p][c], public[p])

    held = [{p: opened(c, p) for p in range(n)} for c in range(n)]
    survivors = range(n - lost)
    uploads = rng.normal(size=(len(survivors), d))
    bound = secure.session_binding(session, bytes(32), range(n))
    vectors = {
        c: secure.mask_vector(session, bound, c, secrets[c], range(n), integers.encode_integers(uploads[c])[0])
        for c in survivors
    }
    text = secure.encode_statement(bound, survivors)
    signed = {c: signing[c].sign(text) for c in survivors}
    for _ in survivors:
        secure.check_statement(session, bound, signed, public)
    told = {c: shares.reveal_shares(held[c], survivors) for c in survivors}
    at_sites = (time.process_time() - start) / n
    start = time.process_time()
    masked = np.sum([*vectors.values()], axis=0, dtype=np.uint64)
    restored, _ = shares.restore_secrets(session, range(n), survivors, told)
    total = integers.decode_integers(secure.unmask_sum(session, bound, survivors, masked, restored), len(survivors))
    at_server = time.process_time() - start
    assert np.abs(total - uploads.sum(0)).max() < n * 2.0**-integers.RESOLUTION_BITS
    advert, sealed = len(secure.write_adverts(adverts[:1])), (n - 1) * (4 + shares.SEALED_SHARE_BYTES)
    agree = secure.SIGNATURE_BYTES * (1 + bool(lost))
    up = advert + sealed + 8 * d + agree + n * (4 + secure.KEY_BYTES)
    down = n * advert + sealed + (4 * bool(lost) + 4 + secure.SIGNATURE_BYTES) * len(survivors)
    return f"{lost:4} {threshold:9} | {up / 1e6:14.3f} {down / 1e6:17.3f} | {at_sites:6.2f} {at_server:9.2f}"


def measure_protections(n: int, d: int) -> dict[str, float]:
    """Return the processor seconds that each protection takes in a round at the server and all sites."""

    def timed(call: Callable[[], object], times: int = 200) -> float:
        call()
        start = time.process_time()
        for _ in range(times):
            call()
        return (time.process_time() - start) / times

    name, threshold, key = bytes(32), secure.safe_threshold(n), Ed25519PrivateKey.generate()
    secrets = [secure.new_secrets() for _ in range(n)]
    session = secure.build_session(
        name, threshold, [secure.make_advert(name, c, x, key) for c, x in enumerate(secrets)]
    )
    text, public, rounds = bytes(shares.SEALED_SHARE_BYTES), key.public_key(), count(1)
    signature, bases, download, total = key.sign(text), {f"{c}": 0 for c in range(n)}, bytes(4 * d), bytes(8 * d)
    sign, check = timed(lambda: key.sign(text)), timed(lambda: public.verify(signature, text))
    one_time = timed(lambda: secure.derive_public_key(shares.one_time_key(session, secrets[0], 1)))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        opened, state, log = OpenedSums(place), SiteState(place, name.hex(), 0), place / "sent.jsonl"
        state.settle(1)

        def reveal() -> None:
            t = next(rounds)
            opened.reveal(f"{t:064x}", {"uploads": t}, {"uploads": name.hex()}, bases, threshold)

        once, over = timed(reveal), timed(state.accepted)
        facts = {"kind": "masked", "round": 1, "status": "ok", "bytes": 8 * d, "numbers": 0, "digest": name.hex()}
        sent = timed(lambda: Audit(log).write("sent", **facts))
    few = 200 if d < 100_000 else 5
    of_download, of_total = (timed(lambda part=part: hashlib.sha256(part).digest(), few) for part in (download, total))
    return {
        "a bad share is shown to be its sender's": n * (n - 1) * (sign + one_time + 2 * check),
        "all sites were asked the same": n * sign + (n * n + n) * check + n * of_download,
        "a round has one sum, a session never begins twice": n * once,
        "a site has a log of what left it": 4 * n * sent,
        "a site answers no round that is over": 4 * n * over,
        "a damaged sum is noticed": 2 * of_total,
    }


if __name__ == "__main__":
    main()
