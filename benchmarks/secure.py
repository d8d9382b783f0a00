"""Secure aggregation: bytes and processor seconds of a round's protocol, all sites in one process.

Usage: python benchmarks/secure.py [--sites 5 20 100] [--d 100000] [--lost 0.1]

Training and the network are left out. The threshold is the default one; a share of the sites drop out after the
shares, so that the server restores their masking keys. A site's seconds are the mean over sites.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.deploy.secure import integers, shares
from fedloom.deploy.secure import protocol as secure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[5, 20, 100])
    parser.add_argument("--d", type=int, default=100_000, help="numbers of an upload")
    parser.add_argument("--lost", type=float, default=0.1, help="share of the sites that drop out after the shares")
    given = parser.parse_args()
    print(f"d = {given.d}")
    print("sites lost threshold | MB up per site  MB down per site | site s  server s")
    for n in given.sites:
        print(f"{n:5} " + row(n, given.d, int(given.lost * n)), flush=True)


def row(n: int, d: int, lost: int) -> str:
    """One line of figures."""
    name, threshold, rng = bytes(32), secure.safe_threshold(n), np.random.default_rng(0)
    signing = [Ed25519PrivateKey.generate() for _ in range(n)]
    public = {c: key.public_key() for c, key in enumerate(signing)}
    start = time.process_time()
    secrets = [secure.new_secrets() for _ in range(n)]
    adverts = [secure.advertise(name, c, secrets[c], signing[c]) for c in range(n)]
    session = secure.session_of(name, threshold, adverts)
    for _ in range(n):
        secure.check_adverts(name, adverts, public)
    sent = [shares.share(session, c, secrets[c], signing[c]) for c in range(n)]

    def opened(c: int, p: int) -> bytes:
        return sent[p][c] if p == c else shares.open_share(session, c, secrets[c], p, sent[p][c], public[p])

    held = [{p: opened(c, p) for p in range(n)} for c in range(n)]
    survivors = range(n - lost)
    uploads = rng.normal(size=(len(survivors), d))
    bound = secure.bound_to(session, bytes(32), range(n))
    vectors = {
        c: secure.masked(session, bound, c, secrets[c], range(n), integers.encode(uploads[c])[0]) for c in survivors
    }
    text = secure.statement(bound, survivors)
    signed = {c: signing[c].sign(text) for c in survivors}
    for _ in survivors:
        secure.check_statement(session, bound, signed, public)
    told = {c: shares.reveal_shares(held[c], survivors) for c in survivors}
    at_sites = (time.process_time() - start) / n
    start = time.process_time()
    masked = np.sum([*vectors.values()], axis=0, dtype=np.uint64)
    restored, _ = shares.restored(session, range(n), survivors, told)
    total = integers.decode(secure.unmasked(session, bound, survivors, masked, restored), len(survivors))
    at_server = time.process_time() - start
    assert np.abs(total - uploads.sum(0)).max() < n * 2.0**-integers.BITS
    advert, sealed = len(secure.write_adverts(adverts[:1])), (n - 1) * (4 + shares.SEALED)
    agree = secure.SIGNATURE * (1 + bool(lost))
    up = advert + sealed + 8 * d + agree + n * (4 + secure.KEY)
    down = n * advert + sealed + (4 * bool(lost) + 4 + secure.SIGNATURE) * len(survivors)
    return f"{lost:4} {threshold:9} | {up / 1e6:14.3f} {down / 1e6:17.3f} | {at_sites:6.2f} {at_server:9.2f}"


if __name__ == "__main__":
    main()
