"""Masked: the sites of a run under secure aggregation, of which the server gets sums (`secure`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.deploy.exchange import secure
from fedloom.deploy.exchange.envelope import Kind
from fedloom.deploy.exchange.forms import Forms, for_client, is_common
from fedloom.deploy.exchange.identity import NONCE, verifying_key
from fedloom.deploy.exchange.post import Letter, Post
from fedloom.deploy.exchange.replies import absolute
from fedloom.deploy.exchange.secure import Broken, Integers
from fedloom.deploy.settings import Server
from fedloom.deploy.site.masking import Vectors
from fedloom.deploy.sites import Sites
from fedloom.engine.job import Job
from fedloom.errors import RunStopped, Stop, WireError
from fedloom.processes.chunks import COUNTS, Trained, TrainTask
from fedloom.storage.files import write_atomic

ASKED = "unmasked.json"
"""Whose sum was asked for last, beside the checkpoints: the round can be played again with the same sites only."""


class MaskedSites(Sites):
    """The sites of a run whose uploads are summed under masks; see `Sites`."""

    def __init__(self, job: Job, forms: Forms, post: Post, settings: Server) -> None:
        super().__init__(job, forms, post, settings)
        assert settings.secure is not None
        self._agreed = settings.secure
        self._agreement = settings.secure.digest(settings.fingerprint)
        self._public = {c: verifying_key(line, f"client {c}") for c, line in enumerate(settings.secure.keys)}
        self._vectors = Vectors(job, forms.idle)
        self._asked = settings.checkpoints / ASKED

    def _train(self, shared: tuple[Any, Any], tasks: Sequence[TrainTask]) -> Iterator[Trained]:
        job, forms, (down, server) = self._job, self._forms, shared
        tasks_of = {int(task.ids): task for task in tasks if bool(self._post.sizes[int(task.ids), 0])}
        received = {c: for_client(down, int(task.place)) for c, task in tasks_of.items()}
        common = forms.write_down(down, server) if is_common(down) else None
        downs = {c: common or forms.write_down(one, server) for c, one in received.items()}
        shares = {c: float(task.share) for c, task in tasks_of.items()}
        total, accepted, scale, traffic = self._session(tasks[0].round, downs, shares)
        try:
            sums, work = self._vectors.decode(total, len(accepted), scale)
            self._check_length(sums, len(accepted), scale)
        except Broken as error:
            raise RunStopped(Stop.DIVERGED, f"round {tasks[0].round}: {error}") from error
        paper = [int(letter.lengths()[1]) for letter in (job.messages.up(forms.idle), job.messages.down(down, server))]
        counts = dict.fromkeys(tasks_of, torch.zeros(1, len(COUNTS), dtype=torch.long))
        for k, c in enumerate(accepted):
            counts[c] = torch.tensor([[*(work.tolist() if k == 0 else [0, 0, 0]), *traffic, *paper]])
        parts: dict[str, Tensor] = sums
        for task in tasks:
            c = int(task.ids)
            if c not in accepted:
                yield Trained(torch.tensor([False]), {}, {}, 0.0, torch.zeros(1, len(COUNTS), dtype=torch.long))
                continue
            yield Trained(torch.tensor([True]), parts, {}, float(task.share), counts[c])
            parts = {}  # the first brings the sum

    def _session(
        self, t: int, downs: Mapping[int, bytes], shares: Mapping[int, float]
    ) -> tuple[Integers, list[int], float, list[int]]:
        """The sum of the sites' vectors, whose it is, what shares were divided by, and bytes per site up and down."""
        nonce, agreed = os.urandom(NONCE), self._agreed
        before = self._before(t)
        cohort = [c for c in downs if before is None or c in before]
        if len(cohort) < agreed.threshold:
            raise RunStopped(
                Stop.TOO_FEW, f"round {t}: {len(cohort)} sites would be summed, the threshold is {agreed.threshold}"
            )
        scale = max(abs(shares[c]) for c in downs) or 1.0

        def step(kind: Kind, to: Collection[int], arrays: Any, read: Callable[[bytes], Any], **more: Any) -> Any:
            head = {"session": nonce}
            letters = {
                c: Letter(kind, c, arrays(c), head | {name: value(c) for name, value in more.items()}, read=read)
                for c in to
            }
            quorum = 1 if kind == "unmask" else min(self._settings.quorum, len(letters))
            need = max(agreed.threshold, quorum)
            replies = self._post.until(t, letters, need)
            return {c: reply.value for c, reply in sorted(replies.items())}

        name = secure.session_name(self._agreement, t, nonce)
        adverts = step("keys", cohort, lambda _c: [], lambda m: self._advert(name, m))
        adverts = {c: advert for c, advert in adverts.items() if advert.client == c}
        session = secure.session_of(name, agreed.threshold, adverts.values())
        everyone = secure.write_adverts(adverts.values())
        sealed = step("shares", adverts, lambda _c: [everyone], lambda m: secure.read(m, secure.SEALED))
        sealed = {p: sent for p, sent in sealed.items() if set(sent) == set(adverts) - {p}}
        inbox = {c: secure.write({p: sent[c] for p, sent in sealed.items() if p != c}) for c in sealed}
        masked = step(
            "masked", sealed, lambda c: [downs[c], inbox[c]], self._vector,
            accepted=lambda c: int(self.accepted[c]), weight=lambda c: float(self._job.alpha[c]),
            share=lambda c: shares[c] / scale,
        )  # fmt: skip
        arrived = secure.write(dict.fromkeys(masked, b""))
        if before is not None and set(masked) != before:
            gone = ", ".join(self._post.members[c].site for c in sorted(before - set(masked)))
            raise RunStopped(Stop.TOO_FEW, f"round {t} was summed before; it can be summed again with {gone} only")
        self._settings.checkpoints.mkdir(parents=True, exist_ok=True)
        write_atomic(self._asked, json.dumps({"round": t, "clients": sorted(masked)}).encode())
        told = step("unmask", masked, lambda _c: [arrived], lambda m: secure.read(m, secure.KEY))
        told = {c: parts for c, parts in told.items() if set(parts) == set(sealed)}
        try:
            total = secure.unmasked(session, [*sealed], masked, told)
        except Broken as error:
            raise RunStopped(Stop.TOO_FEW, f"round {t}: {error}") from error
        n, down = len(adverts), max(map(len, downs.values()))
        part, up = 4 + secure.SEALED, 8 * self._vectors.length
        advert = len(everyone) // n
        traffic = [advert + n * part + up + n * (4 + secure.KEY), n * (advert + part + 4) + down]
        return total, [*masked], scale, traffic

    def _before(self, t: int) -> set[int] | None:
        """Whose sum of this round was asked for before a stop."""
        try:
            found = json.loads(self._asked.read_bytes())
            return set(found["clients"]) if found["round"] == t else None
        except (OSError, ValueError, KeyError):
            return None

    def _advert(self, name: bytes, message: bytes) -> secure.Advert:
        """The one advertisement of a message.

        Raises:
            WireError: the bytes are not that, or nobody's keys in this session: the agreements may differ.
        """
        found = secure.read_adverts(message)
        if len(found) != 1:
            raise WireError(f"one advertisement is expected, got {len(found)}")
        try:
            secure.check_adverts(name, found, self._public)
        except Broken as error:
            raise WireError(f"{error}; do both sides have the same agreement?") from None
        return found[0]

    def _vector(self, message: bytes) -> Integers:
        """A masked vector.

        Raises:
            WireError: its length is another.
        """
        if len(message) != 8 * self._vectors.length:
            raise WireError(f"a masked vector has {8 * self._vectors.length} bytes, got {len(message)}")
        return np.frombuffer(message, dtype="<u8").astype(np.uint64, copy=False)

    def _check_length(self, sums: Mapping[str, Tensor], count: int, scale: float) -> None:
        """That differences are no longer than they can be together; a change of a kept row is one of two.

        Raises:
            Broken: they are.
        """
        bound, squares = self._agreed.norm_bound, 0.0
        if bound is None:
            return
        down = self._job.oracle.layout.d
        for name, value in sums.items():
            kind = self._job.fields[name]
            if not absolute(kind, value.shape[0], down):
                squares += float((value / (2 if kind.keeps else 1 if kind.accumulates else scale)).square().sum())
        if squares**0.5 > count * bound * (1 + 1e-6) + 1e-6:
            raise Broken(
                f"the sum of {count} sites is {squares**0.5:.4g} long, {count * bound:.4g} is the most it can be"
            )
