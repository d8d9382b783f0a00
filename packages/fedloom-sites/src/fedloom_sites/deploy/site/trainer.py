"""Training and scoring at a site, using its samples and the state on its disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedloom.data import Federation
from fedloom.engine.clients.chunk import ClientOutput, ClientState, usable_uploads_mask
from fedloom.engine.job import Job
from fedloom.engine.privacy import Noise, epsilon, find_accounted_noise
from fedloom.engine.setup import make_job
from fedloom.errors import (
    CheckpointError,
    ConfigError,
    LayoutError,
    Refused,
    RunDirError,
    WireError,
    describe_error,
    escape_line,
)
from fedloom.lab.experiment import Experiment
from fedloom.local.rows import name_tensors
from fedloom.processes.clients import Scores
from fedloom.schedule import Synchronous
from fedloom_sites.deploy.code import read_agreed
from fedloom_sites.deploy.noise import SharedMean, deployed_setting, get_site_noise
from fedloom_sites.deploy.protocol.envelope import digest_arrays
from fedloom_sites.deploy.protocol.lengths import clip_upload
from fedloom_sites.deploy.protocol.public import PublicReason, check_private, publish_reasons
from fedloom_sites.deploy.secure.integers import MAX_NUMBER
from fedloom_sites.deploy.secure.member import check_maskable
from fedloom_sites.deploy.setting_files import check_version
from fedloom_sites.deploy.settings import Site, get_norm_bound
from fedloom_sites.deploy.site.crafted import check_change, check_units, layer_norms
from fedloom_sites.deploy.site.ledger import Ledger
from fedloom_sites.deploy.site.local_data import make_blank_federation, part_sizes, samples_digest, site_federation
from fedloom_sites.deploy.site.neutral import neutral_upload
from fedloom_sites.deploy.site.state import SiteState, StateGeneration
from fedloom_sites.transport.forms import Forms
from fedloom_sites.transport.node import Node

T = TypeVar("T")


class TrainedRound(NamedTuple):
    """Result of a round at a site.

    Attributes:
        output: data that the site sends and data that it keeps.
        is_neutral: True if this is the output after zero steps, because the site's result must not leave the site.
    """

    output: ClientOutput
    is_neutral: bool = False


class UnusableResult(Refused):
    """Error: the training result is not finite or exceeds a bound of the experiment, so no server could use it."""


Send = Callable[[Job, StateGeneration | None, TrainedRound, Any], dict[str, Tensor]]
"""Function that maps a run, state, result and download to the next generation's tensors: upload (`reply`) and rows."""

VALUE_FREE_ERRORS = (CheckpointError, ConfigError, LayoutError, RunDirError, WireError)
"""Errors whose messages reveal no value of a sample. Other messages may quote a cell, or text from the user's code
about a cell.

A site that sends individual uploads includes these messages in its replies. Under masks or with a delta, a site sends
only the message of a `PublicReason`.
"""


class Trainer:
    """A run at a single site.

    Args:
        site: the site's settings.
        memory: the site's state on disk.
        fed: samples of the site, if they have already been read. None if the samples are read from the source in the
            site's settings.

    Attributes:
        site: settings of the site.
    """

    def __init__(self, site: Site, memory: SiteState, fed: Federation | None = None) -> None:
        self.site, self._memory, self._given = site, memory, fed

    @property
    def fed(self) -> Federation:
        """The site's samples, represented as one client of the federation."""
        check_private()
        return self._fed

    @cached_property
    def _fed(self) -> Federation:
        return site_federation(self.experiment, self.site) if self._given is None else self._given

    @cached_property
    def experiment(self) -> Experiment:
        """Agreed experiment."""
        check_version(self.site)
        experiment = read_agreed(self.site, clients_per_batch=1, workers=1)
        if self.site.secure is not None:
            check_maskable(experiment.methods[0].setting, verify=self.site.secure.verify)
        return experiment

    @property
    def rounds(self) -> int:
        """Number of rounds in the experiment."""
        return self.experiment.methods[0].setting.rounds

    @cached_property
    def private(self) -> bool:
        """True if a delta or an epsilon is set for the site. Epsilon then covers all data that leave the site."""
        setting = self.experiment.methods[0].setting
        return (
            self.site.epsilon is not None
            or find_accounted_noise(setting.upload_transform, setting.aggregator) is not None
        )

    @cached_property
    def samples(self) -> str:
        """Digest of the site's samples. The digest never leaves the site."""
        return samples_digest(self.fed, self.site.client)

    @cached_property
    def node(self) -> Node:
        """The run at this site, and the initial state of its server."""
        job, server = make_job(self.experiment.methods[0].setting.with_(schedule=Synchronous()), self.fed)
        return Node(replace(job, setting=deployed_setting(job.setting, self.site.survivors)), server, self.site.client)

    @property
    def job(self) -> Job:
        """The run at this site."""
        return self.node.job

    @property
    def forms(self) -> Forms:
        """Encoding of the site's messages."""
        return self.node.forms

    @property
    def noise(self) -> Noise | None:
        """Noise that provides this site's epsilon (see `get_site_noise`)."""
        return get_site_noise(self.job.setting)

    @property
    def ids(self) -> Tensor:
        """Number of the site, ``[1]``."""
        return torch.tensor([self.site.client])

    def weighed(self, share: float) -> Job:
        """Return the run with the weight in the objective that the server assigned to the site."""
        return replace(self.job, alpha=torch.full_like(self.job.alpha, share))

    def attach_local_data(self, accepted: int, job: Job) -> tuple[Job, StateGeneration | None]:
        """Load the state that the server accepted into a run, and return the run and the state."""
        with publish_reasons():
            state = self._memory.settle(accepted)
        self.node.load_state(job, None if state is None else state.tensors)
        return job, state

    def train(
        self, job: Job, state: StateGeneration | None, t: int, download: bytes, send: Send,
        weights: Sequence[float] = (), *, stays_neutral: bool = False,
    ) -> StateGeneration:  # fmt: skip
        """Train for a round, and return the generation that results.

        If the request is repeated, the stored generation is returned.

        Args:
            job: run from `attach_local_data`.
            state: the site's state.
            t: round.
            download: message from the server.
            send: function that encodes the upload, and those of its rows that the site stores.
            weights: additional numbers that affect the upload.
            stays_neutral: True to send the neutral upload, regardless of the result of the training.

        Raises:
            PublicReason: the download does not belong to this run or is too far from the previous download, the privacy
                budget is spent, or the disk is full.
            FedloomError: the training failed or its result is not finite, in a run without masks and without accounted
                noise at the site.
        """
        site, samples = self.site, self.samples
        base, digest = 0 if state is None else state.round, _request_digest(download, weights)
        with publish_reasons():
            kept = self._memory.answered(t, base, digest)
            if kept is not None:
                return kept
            if site.dead_units is not None and self.private:
                raise ConfigError(
                    "dead_units is computed from samples without noise, but an agreed delta or "
                    "epsilon requires noise. Remove dead_units from site.toml"
                )
            down = self.forms.read_down(download)
            norms, before = layer_norms(job, down), [] if state is None else state.reply.get("norms", [])
            check_change(site.model_change, norms, before, f"site {site.site}, round {t}")
            releases = self._ledger.release(t, samples=samples)
        trained = self._trained(job, down, t, stays_neutral)
        state_rows = {name: rows[0] for name, rows in name_tensors(trained.output.state).items()}
        tensors = state_rows | send(job, state, trained, down)
        facts = {"work": trained.output.work[0].tolist(), "neutral": int(trained.is_neutral)}
        new = StateGeneration(t, base, digest, tensors, {**facts, "releases": releases, "norms": norms})
        with publish_reasons():
            self._memory.keep(new)
        return new

    @property
    def _ledger(self) -> Ledger:
        """Ledger of what the site has released.

        If `site.toml` sets no limit, the limit allows one release per agreed round.
        """
        noise, limit = self.noise, self.site.epsilon
        if noise is not None and limit is None:
            limit = epsilon(noise, self.rounds)
        before, accepted = (0, 0) if noise is None else (self._memory.releases(), self._memory.accepted()[0])
        memory = None if self.site.epsilon is None else self.site.memory_folder
        return Ledger(self._memory.folder, noise, limit, f"site {self.site.site}", before, accepted, memory)

    def _trained(self, job: Job, down: Any, t: int, stays_neutral: bool) -> TrainedRound:
        """Train for a round, and return the result.

        Under masks or with noise at the site, no answer shows that the training failed.

        After a failure, the state is unchanged. With noise, the site then sends only noise. Under masks, the site sends
        its neutral upload, which it computes in every round, because the response time would otherwise show the server
        which sites send one.
        """
        site, work, neutral = self.site, torch.zeros(1, 3, dtype=torch.long), self.forms.idle
        if site.secure is not None and self.noise is None:
            neutral = neutral_upload(self._blank, job, down, t, self.ids, self.forms.idle)
        try:
            output = self.node.train(job, down, t)
            work = output.work
            self._check_result(job, output, down, t)
            check_units(site.dead_units, job, down, t, self.ids, len(site.samples.vocabulary))
            if stays_neutral:
                raise Refused(
                    f"round {t}: this site's uploads have changed between neutral and not neutral "
                    "more often than the agreement allows"
                )
        except Exception as error:
            if self.noise is None and site.secure is None:
                raise
            self.log_privately(describe_error(error))
            if self.noise is not None:
                return TrainedRound(self._noise_alone(job, down))
            return TrainedRound(ClientOutput(neutral, self._site_state(job), work), is_neutral=True)
        return TrainedRound(output)

    def _check_result(self, job: Job, output: ClientOutput, down: Any, t: int) -> None:
        """Raise an error if a result is unusable.

        Under masks, an upload beyond its bounds is unusable as well. If it were scaled down, a crafted model could make
        the uploads of all other sites too long, and the sum would then be almost exactly the upload of one site.

        Raises:
            ConfigError: the result is not finite, or (under masks) the norm of the upload or of a row of the site's
                state exceeds its bound, a number is out of range or a weight is negative.
        """
        secure, longest = self.site.secure, job.setting.engine.norm_bound
        if not bool(usable_uploads_mask((*output.upload, *output.state.rows), 1, None).all()):
            raise UnusableResult(f"round {t}: the result of the training is not finite")
        if self.noise is not None:
            return
        if not bool(usable_uploads_mask(tuple(output.state.rows), 1, longest).all()):
            raise UnusableResult(f"round {t}: the norm of a row of this site's state exceeds engine.norm_bound")
        if secure is None:
            return  # the server checks the upload
        if not bool(usable_uploads_mask(tuple(output.upload), 1, None, job.weights(output.upload)).all()):
            raise Refused(f"round {t}: the upload contains a negative weight")
        if isinstance(job.setting.aggregator, SharedMean):
            return  # the aggregator clips the upload before it adds noise
        bounds = {name: get_norm_bound(secure.norm_bound, name) for name in job.fields}
        if clip_upload(job, output.upload, down, bounds)[1]:
            raise Refused(
                f"round {t}: the norm of the upload exceeds norm_bound of the agreement, or engine.norm_bound"
            )
        if any(bool((field.abs() > MAX_NUMBER).any()) for field in output.upload):
            raise Refused(f"round {t}: a number of the upload is not between {-MAX_NUMBER:g} and {MAX_NUMBER:g}")

    @cached_property
    def _blank(self) -> Job:
        """The same run on blank samples, so that a neutral upload reveals nothing about the site's samples."""
        sizes = torch.tensor([[1, 0, 0]]).repeat(self.site.clients, 1)
        sizes[self.site.client] = torch.tensor(part_sizes(self.fed, self.site.client))
        setting = self.experiment.methods[0].setting.with_(schedule=Synchronous())
        return make_job(setting, make_blank_federation(self.site.samples, sizes))[0]

    def _site_state(self, job: Job) -> ClientState:
        """Return the site's own state."""
        return ClientState(**{name: store.read(self.ids) for name, store in job.state_stores.items()})

    def _noise_alone(self, job: Job, down: object) -> ClientOutput:
        up = self.forms.idle
        if find_accounted_noise(job.setting.upload_transform) is not None:
            assert job.setting.upload_transform is not None
            sent, _ = job.setting.upload_transform.apply(None, torch.zeros_like(job.messages.update(up)), ())
            up = job.messages.absolute(job.messages.replace_update(up, sent), job.algorithm.received(down, up))
        return ClientOutput(up, self._site_state(job), torch.zeros(1, 3).long())

    def scores(self, job: Job, models: Sequence[bytes], t: int, *, common: bool) -> Scores:
        """Compute the scores of round ``t``, or return {} for a negative round. A failure is recorded in a note.

        If the latest model cannot be stored on disk, however, the site does not answer.

        Args:
            job: run from `attach_local_data`.
            models: messages from the server that contain models.
            t: round.
            common: True if the global model is also scored.
        """
        return self.attempt(f"round {t}", lambda: self._score(job, models, t, common)) or {} if t >= 0 else {}

    def attempt(self, what: str, score: Callable[[], T]) -> T | None:
        """Return the result of a scoring function, or None if the function fails. A failure is recorded in a note.

        Raises:
            PublicReason: the disk is full or cannot be written to.
        """
        try:
            return score()
        except PublicReason:  # no answer, because a sum without this site's scores would look complete
            raise
        except Exception as error:  # under a delta, the failure may reveal samples
            what = f"{what} cannot be scored"
            sentence = (
                f"{what}: {error}"
                if isinstance(error, VALUE_FREE_ERRORS)
                else f"{what}. The site's own log states the reason"
            )
            self.log_privately(f"{what}: {describe_error(error)}")
            if not self.private and self.site.secure is None:
                self._memory.notes.append(sentence)
            return None

    def _score(self, job: Job, models: Sequence[bytes], t: int, common: bool) -> Scores:
        """Store the latest model, and return every model's scores on the site's parts of the data."""
        has_samples = bool(part_sizes(self.fed, self.site.client)[0])
        received = self.node.read_models(job, models, t, common=common, trained=has_samples)
        if received.row is not None:
            header = job.oracle.layout.header()
            with publish_reasons():
                self._memory.keep_model(received.row.cpu(), header, t, received.kind)
        if not has_samples or self.scoring == "off":
            return {}
        return self.node.score(job, received, t)

    @property
    def sends_groups(self) -> bool:
        """True if scores of groups leave the site, either together with summed scores or in a run without masks."""
        return self.scoring == ("per-site" if self.site.secure is None else "masked")

    @property
    def scoring(self) -> Literal["masked", "per-site", "off"]:
        """How scores leave the site: summed under masks, individually, or not at all.

        Scores are sent without noise, so no scores leave a site that is `private`.
        """
        if self.private:
            return "off"
        return "per-site" if self.site.secure is None else self.site.secure.scores

    def log_privately(self, reason: str) -> str:
        """Write a reason to the site's log, and return a message for the server that omits the reason."""
        sys.stderr.write(
            f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} fedloom: site {self.site.site}: {escape_line(reason)}\n"
        )
        return f"site {self.site.site} could not answer. Its own log states the reason"


def _request_digest(download: bytes, weights: Sequence[float]) -> str:
    """Return the digest of a round's request, i.e. of the download and, if the request contains them, the weights."""
    return digest_arrays([download, *([repr(tuple(weights)).encode()] if weights else [])])
