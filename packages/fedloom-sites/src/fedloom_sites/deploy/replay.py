"""Replay of the server's steps at a site, which trains and scores only models computed from the opened sums."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedloom.engine.clients.uploads import Uploads, compute_weights
from fedloom.engine.job import Job
from fedloom.engine.round import sort_by_samples, update_server
from fedloom.engine.scoring import score_request
from fedloom.engine.setup import make_job
from fedloom.engine.state import State, Times, initial_state
from fedloom.errors import CheckpointError, LayoutError, WireError
from fedloom.lab.experiment import Experiment
from fedloom.processes.clients import CLIENT_COUNTS, SumResult
from fedloom.schedule import Synchronous
from fedloom.storage import make_folder
from fedloom.storage.checkpoint import check_file_digest, save_tensors
from fedloom.storage.files import delete_files
from fedloom_sites.deploy.alarms import raise_alarm
from fedloom_sites.deploy.audit import SENT_FILE, Audit
from fedloom_sites.deploy.noise import SharedMean, deployed_setting
from fedloom_sites.deploy.protocol.identity import read_verifying_key
from fedloom_sites.deploy.relay import LINKS_FILE, RelayedSum, compute_first_link, compute_next_link, open_relayed
from fedloom_sites.deploy.secure.opened import read_checked, write_checked
from fedloom_sites.deploy.secure.protocol import Integers, ProtocolBroken
from fedloom_sites.deploy.secure.terms import SessionTerms
from fedloom_sites.deploy.secure.vectors import UploadVector, check_length
from fedloom_sites.deploy.settings import NormBound, SharedSettings, Site
from fedloom_sites.deploy.site.local_data import make_blank_federation
from fedloom_sites.transport.forms import Forms

MODEL_TOLERANCE = 1e-6
"""Relative and absolute tolerance for comparing the server's models, because rounding errors differ between
processors."""


def make_server_job(
    settings: SharedSettings, experiment: Experiment, sizes: Tensor, folder: Path
) -> tuple[Job, Any, Forms]:
    """Return a run without samples and client state, with its initial state and its message formats.

    Rounds of this run use the quorum in the server's settings instead of the engine's quorum.

    Args:
        settings: settings of the server, or of a site that replays the server's steps.
        experiment: the agreed experiment.
        sizes: ``[n, 3]`` numbers of training, validation and test samples of every site.
        folder: folder for state that does not fit into memory.
    """
    fed = make_blank_federation(settings.samples, sizes)
    setting = experiment.methods[0].setting
    setting = setting.with_(engine=setting.engine.with_(quorum=1e-9, device="cpu"))
    schedule = setting.schedule  # a schedule in real time, which `check_deployable` has accepted
    scored = setting.evaluate.with_(batchnorm_stats="own")  # sites score with their own statistics
    planned = setting.with_(schedule=Synchronous(), evaluate=scored)
    job, server = make_job(planned, fed, folder=folder)
    forms = Forms(job, server)
    noisy = deployed_setting(job.setting, settings.survivors)
    job = replace(job, setting=noisy.with_(schedule=schedule, evaluate=setting.evaluate))
    return job.drop_states(), server, forms


def decode_sum(
    job: Job, form: UploadVector, total: Integers, count: int, shares: Mapping[int, float], bound: NormBound | None
) -> tuple[dict[str, Tensor], Tensor, int]:  # fmt: skip
    """Decode the uploads of a sum and check their norms (see `UploadVector.decode`).

    Args:
        job: run on the server's side.
        form: format of an upload.
        total: sum of the vectors, which begin with the uploads.
        count: number of sites in the sum.
        shares: weight in the mean of every site of the cohort that has samples.
        bound: agreed norm bound.

    Raises:
        ProtocolBroken: the sum is out of range, or a norm exceeds its bound.
    """
    scale = max(map(abs, shares.values()), default=0.0) or 1.0
    sums, work, clipped = form.decode(total[: form.length], count, scale)
    check_length(job, sums, count, scale, bound)
    return sums, work, clipped


def make_result(
    job: Job, ids: Tensor, clients: Collection[int], parts: dict[str, Tensor], shares: Mapping[int, float],
    counts: Tensor,
) -> SumResult:  # fmt: skip
    """Return the result of a round from the decoded sum of its uploads.

    Args:
        job: run on the server's side.
        ids: cohort of the round, in the order of the request.
        clients: sites in the sum.
        parts: decoded fields of the sum.
        shares: see `decode_sum`.
        counts: total work and traffic (see `SumResult`).
    """
    summed = torch.isin(ids, torch.tensor([*clients]))
    alike = isinstance(job.setting.aggregator, SharedMean)
    total = float(sum(1.0 if alike else shares[c] for c in ids[summed].tolist()))
    return SumResult(ids[summed], ids[~summed], parts, total, counts)


class ModelReplay:
    """Chain of the sums that a site opened, and the server states that follow from these sums.

    The two newest states are kept on the site's disk, because a server that has lost its newest checkpoint goes back
    one round.

    Args:
        site: settings of the site, with secure aggregation.
        experiment: function that returns the agreed experiment.
        log: function that writes a sentence to the site's own log.
    """

    def __init__(self, site: Site, experiment: Callable[[], Experiment], log: Callable[[str], object]) -> None:
        assert site.secure is not None
        self._site, self._agreed, self._experiment, self._log = site, site.secure, experiment, log
        self._agreement = site.secure.digest(site.fingerprint)
        self._public = {c: read_verifying_key(line, f"client {c}") for c, line in enumerate(site.secure.keys)}
        self._folder = site.folder / "verified"
        self._states = dict[str, State]()
        self._prepared: tuple[object, Job, Any, Forms, UploadVector] | None = None

    def add(self, round: int, nonce: bytes, parts: Sequence[bytes]) -> bytes:
        """Open the relayed sum of a round, replay the server's step, and return the link after the round.

        Raises:
            ProtocolBroken: the sum does not continue this site's chain, or a part of it is wrong.
            WireError: the arrays cannot be read.
        """
        with self.watch(f"round {round}"):
            links = self._read_chain()
            if round in links:
                return bytes.fromhex(links[round])
            if round < max(links, default=0):
                raise ProtocolBroken(
                    f"the relayed sum of round {round} comes after round {max(links)}, which is already opened"
                )
            before = bytes.fromhex(links[max(links)] if links else self._first_link)
            opened = open_relayed(self._agreed, self._agreement, self._public, round, nonce, before, parts)
            _, _, _, _, form = self._make_job(opened.terms.sizes)
            state = self._step(self._state(before.hex(), opened.terms.sizes), opened)
            link = compute_next_link(before, opened, form.length)
            make_folder(self._folder, mode=0o700)
            save_tensors(self._path(round), state.tensors(), {"round": str(round), "trained": str(state.trained)})
            self._states[link.hex()] = state
            links[round] = link.hex()
            sizes = [[*one] for one in opened.terms.sizes]
            write_checked(
                self._folder / LINKS_FILE, {"links": {str(t): one for t, one in links.items()}, "sizes": sizes}
            )
            self._forget(links)
            return link

    def check_link(self, round: int, link: bytes) -> None:
        """Raise an error if a session is not about the newest state of the server.

        The state before it is accepted up to the round that has led to the newest state.

        Raises:
            ProtocolBroken: the link differs from the expected link.
        """
        links = self._read_chain()
        recent = [self._first_link, *(links[t] for t in sorted(links))][-2 if round <= max(links, default=0) else -1 :]
        if link.hex() not in recent:
            with self.watch("a new session"):
                raise ProtocolBroken(
                    "the server asks about sums that this site did not open. This site opened the sums up to round "
                    f"{max(links, default=0)}. Restore the server's newest checkpoints or this site's folder "
                    "from a copy, or continue without this site"
                )

    def compute_messages(
        self, terms: SessionTerms, download: bytes | None, models: Sequence[bytes]
    ) -> tuple[bytes | None, list[bytes]]:
        """Return the download and the models to score, computed by this site, in place of the server's messages.

        If the server's messages differ from them by more than `MODEL_TOLERANCE`, the site raises an alarm.

        Args:
            terms: terms of the session, which contain the link of the chain.
            download: message from the server. None if the site does not train.
            models: models from the server that the site scores.

        Raises:
            ProtocolBroken: the terms name a link other than the newest link before the round, or different models to
                score.
        """
        if download is None and not models and {terms.download, *terms.models} <= {""} and terms.scored < 0:
            return None, []
        links, newest = self._read_chain(), terms.round - terms.trains
        link = links[max(known)] if (known := [t for t in links if t <= newest]) else self._first_link
        if (terms.download, terms.models) != (link * (download is not None), (link,) if models else ()):
            raise ProtocolBroken(
                f"the terms must name this site's chain of opened sums up to round {newest}, and no other model"
            )
        if terms.scored > newest or (terms.scored >= 0 and not models):
            raise ProtocolBroken(f"the terms must score the model after the sums up to round {newest}")
        _, job, _, forms, _ = self._make_job(terms.sizes)
        state = self._state(link, terms.sizes)
        message, computed_models, place = None, list[bytes](), f"round {terms.round}"
        if download is not None:
            ids = _sort_cohort(job, terms.cohort)
            message = forms.write_down(job.down(state.server, terms.round, ids), state.server)
            self._compare(place, download, message, lambda sent: [*forms.read_down(sent)])
        if models:
            t = terms.round if terms.scored < 0 else terms.scored
            request = score_request(job, state.with_(round=t))
            if request is None or (request.model is not None) != terms.common:
                raise ProtocolBroken("the terms name models to score that the experiment does not have")
            computed_models = next(iter(forms.write_models_of(request, [self._site.client])))[1]

            def read(sent: Sequence[bytes]) -> list[Tensor]:
                down, shared = forms.read_models([*sent], global_there=terms.common)
                return [*(down or ()), *([] if shared is None else [shared])]

            self._compare(place, [*models], computed_models, read)
        return message, computed_models

    @contextmanager
    def watch(self, place: str) -> Iterator[None]:
        """Raise an alarm about an error in the server's messages."""
        try:
            yield
        except (ProtocolBroken, WireError) as error:
            self._raise_alarm(f"{place}: {error}")
            raise

    # ------------------------------------------------------------------------------------------------------- inside

    def _step(self, before: State, opened: RelayedSum) -> State:
        """Replay the server's step with an opened sum, and return the state after the round."""
        terms, (_, job, _, _, form) = opened.terms, self._make_job(opened.terms.sizes)
        ids = _sort_cohort(job, terms.cohort)
        weights = compute_weights(job, before.weigher, None, job.ctx(terms.round, ids))[0].double().flatten()
        shares = dict(zip(ids.tolist(), weights.tolist(), strict=True))
        parts, _, _ = decode_sum(job, form, opened.total, len(opened.survivors), shares, self._agreed.norm_bound)
        nothing = torch.zeros(len(CLIENT_COUNTS), dtype=torch.long)
        uploads = Uploads(job, before.sums)
        uploads.add(make_result(job, ids, opened.survivors, parts, shares, nothing))
        return update_server(job, before, terms.round, ids, before.sampler, nothing, uploads)[0]

    def _make_job(self, sizes: Sequence[Sequence[int]]) -> tuple[object, Job, Any, Forms, UploadVector]:
        """Return the server's run for these numbers of samples, which never change during a run.

        Raises:
            ProtocolBroken: the numbers of samples differ from the numbers in earlier rounds.
        """
        facts = [[*one] for one in sizes]
        if (read_checked(self._folder / LINKS_FILE) or {}).get("sizes", facts) != facts:
            raise ProtocolBroken("the terms state other numbers of samples than the terms of earlier rounds")
        if self._prepared is None or self._prepared[0] != facts:
            job, server, forms = make_server_job(self._site, self._experiment(), torch.tensor(facts), self._folder)
            self._prepared = facts, job, server, forms, UploadVector(job, forms.idle)
            self._states.clear()  # the initial state depends on the numbers of samples
        return self._prepared

    def _state(self, link: str, sizes: Sequence[Sequence[int]]) -> State:
        """Return the state of the server after the sums of a link.

        Raises:
            ProtocolBroken: the site does not know the link.
            CheckpointError: the file with the state is damaged.
        """
        if link not in self._states:
            _, job, server, _, _ = self._make_job(sizes)
            state, links = initial_state(job, server), self._read_chain()
            t = next((t for t, one in links.items() if one == link), 0)
            if not t and link != self._first_link:
                raise ProtocolBroken("the terms name a chain of opened sums that differs from this site's own chain")
            if t:
                try:
                    check_file_digest(self._path(t))
                    state = state.restored(t, load_file(self._path(t)), [], Times())
                except (OSError, LayoutError) as error:
                    raise CheckpointError(
                        f"the state of round {t}, which this site has verified, cannot be read: {error}. Restore the "
                        "site's folder, or continue without this site"
                    ) from None
            self._states[link] = state
        return self._states[link]

    def _compare(self, place: str, got: Any, computed: Any, read: Callable[[Any], list[Tensor]]) -> None:
        """Raise an alarm if the server's copy of a model differs from the model computed by this site."""
        if got == computed:
            return
        try:
            pairs = list(zip(read(got), read(computed), strict=True))
            same = all(torch.allclose(a, b, rtol=MODEL_TOLERANCE, atol=MODEL_TOLERANCE) for a, b in pairs)
        except (WireError, ValueError, RuntimeError):
            same = False
        if not same:
            self._raise_alarm(
                f"{place}: the model that the server sent differs from the model that follows from the opened sums. "
                "This site uses only the model that it computed itself"
            )

    def _raise_alarm(self, reason: str) -> None:
        self._log(f"ALARM: {reason}")
        raise_alarm(Audit(self._site.folder / SENT_FILE), f"ALARM: {reason}. Ask the coordinator")

    def _read_chain(self) -> dict[int, str]:
        return {int(t): link for t, link in (read_checked(self._folder / LINKS_FILE) or {"links": {}})["links"].items()}

    @cached_property
    def _first_link(self) -> str:
        return compute_first_link(self._site, self._experiment().methods[0].setting).hex()

    def _path(self, t: int) -> Path:
        return self._folder / f"round-{t:06d}.safetensors"

    def _forget(self, links: Mapping[int, str]) -> None:
        """Delete all states except the two newest."""
        kept = sorted(links)[-2:]
        self._states = {link: state for link, state in self._states.items() if link in {links[t] for t in kept}}
        names = {self._path(t).name for t in kept}
        delete_files(*(p for p in self._folder.glob("round-*.safetensors") if p.name not in names))


def _sort_cohort(job: Job, cohort: Sequence[int]) -> Tensor:
    """Return a cohort in the server's order."""
    ids = torch.tensor(cohort)
    return ids[sort_by_samples(job, ids)]
