"""The server of a deployment: the rounds of a simulation, whose chunks are computed at real sites."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedloom.algorithms import upload_fields
from fedloom.choose import Uniform, UniformWeigher
from fedloom.deploy.audit import Audit
from fedloom.deploy.code import read_agreed
from fedloom.deploy.exchange.forms import Forms
from fedloom.deploy.exchange.masked import GivenUp, MaskedSites
from fedloom.deploy.exchange.post import Post
from fedloom.deploy.noise import SharedMean, released
from fedloom.deploy.results import SUMMARY, Results
from fedloom.deploy.settings import Server, check_version
from fedloom.deploy.site.ledger import Ledger
from fedloom.deploy.site.local_data import federation_of
from fedloom.deploy.site.masking import check_maskable
from fedloom.deploy.sites import Sites
from fedloom.deploy.status import serve_metrics
from fedloom.engine.job import Job
from fedloom.engine.privacy import accounted, check_privacy, spent
from fedloom.engine.records import Divergence
from fedloom.engine.resume import Disk
from fedloom.engine.round import play
from fedloom.engine.scoring import record, scores_of
from fedloom.engine.setup import make_job
from fedloom.engine.state import State, initial_state
from fedloom.errors import Refused, RunStopped, Stop
from fedloom.experiment import Experiment
from fedloom.local import Nothing
from fedloom.rows.channel import GaussianNoise
from fedloom.storage.checkpoint import Checkpoints
from fedloom.storage.files import lock
from fedloom.storage.store import Store
from fedloom.version import __version__

Say = Callable[[str], None]

STOPS = "fedloom: stops: "
"""How the line begins that says why a run ended early."""
FINISHED = "all rounds are done; for more of them, deploy an experiment with more rounds"


def serve(grid: Grid, settings: Server, say: Say = print) -> Stop:
    """Train at the sites until all rounds are done; after a stop or a crash, the same call goes on.

    Args:
        grid: Flower's.
        settings: of the server.
        say: prints a line.

    Returns:
        Why the run ended.

    Raises:
        ConfigError: the experiment is not the one agreed on, or cannot be deployed.
        RunDirError: another server works on the same experiment.
        CheckpointError: the disk is full or refuses, or no checkpoint can be read.
    """
    check_version(settings)
    experiment = read_agreed(settings, workers=1, chunk=1)
    check_deployable(experiment, masked=settings.secure is not None)
    with lock(settings.checkpoints):
        ended = finished(settings)
        if ended is not None:
            say(f"fedloom: {FINISHED}")
            return ended
        with serve_metrics(settings):
            return _Run(grid, settings, experiment, say).go()


def finished(settings: Server) -> Stop | None:
    """How a run ended whose rounds are all done and whose results are written, so that no site is needed any more.

    Raises:
        CheckpointError: no checkpoint can be read.
        RunDirError: the checkpoints are of another experiment.
    """
    newest = Checkpoints(settings.checkpoints).load(settings.fingerprint[:16])
    try:
        told = json.loads((settings.results / SUMMARY).read_bytes())["stop"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Stop[told] if told is not None and newest is not None and newest.meta["stop"] == told else None


def check_deployable(experiment: Experiment, *, masked: bool = False) -> None:
    """Refuse what makes sense in a simulation only and, ``masked`` by secure aggregation, what needs single uploads.

    Raises:
        Refused: the sentence says why.
    """
    method = experiment.methods[0]
    if experiment.common.attack is not None:
        raise Refused("an attack is for simulation: leave the table [attack] out to deploy this experiment")
    if experiment.common.evaluate.clients is not None:
        raise Refused("evaluate.clients is for simulation, every site scores models: leave it out to deploy")
    if method.setting.pooled:
        raise Refused(f"{method.label} pools the data of all clients, which real sites do not give; choose another")
    if experiment.common.model.weights is not None:
        raise Refused(
            "model.weights is a file of this machine, and nothing holds the sites to the same one: leave it out, or "
            "give a function of a package that every site has, [model] kind = 'package.module:function'"
        )
    setting = method.setting.resolved()
    fields, sampler = upload_fields(type(setting.method)), setting.sampler
    check_privacy(setting.method, setting.channel, setting.aggregator, sampler, setting.weigher)
    if sampler.learns and any(k.primary and k.base.startswith("rows.") for k in fields.values()):
        raise Refused(
            f"sampler {sampler.kind!r} looks at the clients' models, but {method.label} uploads a difference to a "
            "state that stays at the client; choose another sampler"
        )
    if masked:
        check_maskable(setting)


class _Run:
    """One run: what it has, and its rounds."""

    def __init__(self, grid: Grid, settings: Server, experiment: Experiment, say: Say) -> None:
        self._settings, self._experiment, self._say = settings, experiment, say
        self._audit = Audit(settings.audit)
        self._post = Post(grid, settings, self._audit, say)
        self._results = Results(settings, experiment)
        self._divergence = Divergence()

    def go(self) -> Stop:
        """Begin or go on, to the end."""
        settings, stop, detail = self._settings, Stop.DONE, ""
        diverged: int | None = None
        self._audit.write("wait", release=__version__)
        try:
            self._gather()
            job, server, forms = self._job()
            disk = Disk(job, settings.checkpoints, settings.fingerprint[:16])
            sites = (Sites if settings.secure is None else MaskedSites)(job, forms, self._post, settings)
            state, ended = disk.resume(initial_state(job, server))
            if disk.more:
                sites.accepted = torch.tensor(disk.more["accepted"])
                self._say(f"fedloom: goes on after round {state.round}")
            for note in job.notes:
                self._say(f"fedloom: {note}")
            self._audit.write("start", round=state.round, release=__version__, sites=sorted(self._post.nodes))
            self._divergence.read(state.records)
            if ended is None:
                state = self._rounds(job, sites, disk, state)
                self._divergence.read(state.records, ended=True)
                diverged, detail = self._divergence.round, self._divergence.sentence
                stop, disk.diverged = Stop.DONE if diverged is None else Stop.DIVERGED, diverged
                disk.save(state, stop, detail)
            else:
                stop, detail, diverged = ended, disk.detail, disk.diverged
            self._results.tables(job, state, disk.times)
        except RunStopped as error:
            stop, detail = error.reason, error.detail
            self._say(f"{STOPS}{error}")
        self._audit.write("stop", reason=stop.value, detail=detail or None)
        self._results.summary(stop, detail, self._post.nodes, diverged)
        return stop

    def _rounds(self, job: Job, sites: Sites, disk: Disk, state: State) -> State:
        pool: Any = sites
        while True:
            t = state.round
            self._results.tell(job, state)
            last = t == job.setting.rounds
            due = (last or t % job.setting.evaluate.every == 0) and not _scored_before(state)
            if last:
                self._scored(job, pool, state, disk, due=due)
                return state
            try:
                self._release(job, state)
            except RunStopped:
                self._scored(job, pool, state, disk, due=due)
                raise
            secure = self._settings.secure
            carried = due and (secure is None or secure.scores != "per-site")  # which a masked vector has no place for
            if carried:
                sites.carry(state)
            else:
                self._scored(job, pool, state, disk, due=due)
            before, start = state, time.monotonic()
            try:
                state = play(job, pool, before)
                sites.accepted[state.cohort] = state.round
            except GivenUp as error:
                state = self._given_up(before, error)
            except RunStopped:
                if carried:
                    self._scored(job, pool, before, disk, due=False)
                raise
            disk.times.rounds.append(time.monotonic() - start)
            if carried:
                self._scored(job, pool, before, disk, due=True)
            disk.more = self._more(job, sites.accepted, state)
            disk.save(state, None)

    def _given_up(self, state: State, error: GivenUp) -> State:
        """The state after a round of which nothing is known: all is as before it, but for what it cost of privacy."""
        t, clients = state.round + 1, torch.tensor(error.clients)
        self._post.note("given up", t, error.clients, str(error))
        state.notes.append(f"{_gone(t)}{error}")
        return state.with_(round=t, uploads=state.uploads.index_add(0, clients, torch.ones_like(clients)))

    def _scored(self, job: Job, pool: Any, state: State, disk: Disk, *, due: bool) -> None:
        """Record the scores of a state where they are due, and say how its round went."""
        if due:
            record(job, state, scores_of(job, pool, state))
            for model, part, name, value in pool.sums(state.round):
                state.records.total(state.round, model, part, name, value)
            if diverges := self._divergence.read(state.records):
                self._say(f"fedloom: diverges: {diverges}; the run goes on")
                self._audit.write("diverges", round=state.round, reason=diverges)
            self._results.tables(job, state, disk.times)
            self._results.summary(None, "", self._post.nodes)
        if state.round > 0:
            self._say(self._line(job, state))

    def _more(self, job: Job, accepted: Tensor, state: State) -> dict[str, Any]:
        noise = accounted(job.setting.channel, job.setting.aggregator)
        epsilon = None if noise is None else spent(noise, job.setting.sampler, state.uploads, state.round)
        return {"accepted": accepted.tolist(), "sizes": self._post.sizes.tolist(), "epsilon": epsilon}

    def _gather(self) -> None:
        """Wait for the sites; numbers of samples that the run began with hold."""
        known = self._known_sizes()
        if known is not None:
            self._post.sizes.copy_(known)
            self._post.presence.fix()
        method = self._experiment.methods[0]
        setting = method.setting.resolved()
        plain = isinstance(setting.sampler, Uniform) and isinstance(setting.weigher, UniformWeigher)
        everyone = known is None and (setting.weights == "samples" or not plain)
        self._post.gather(everyone)

    def _known_sizes(self) -> Tensor | None:
        """What the newest checkpoint says."""
        loaded = Checkpoints(self._settings.checkpoints).load(self._settings.fingerprint[:16])
        return None if loaded is None or not loaded.meta["more"] else torch.tensor(loaded.meta["more"]["sizes"])

    def _job(self) -> tuple[Job, Any, Forms]:
        """The run without samples or client state; a round needs the quorum of the settings."""
        fed = federation_of(self._settings.samples, self._post.sizes)
        experiment = self._experiment
        setting = experiment.methods[0].setting
        setting = setting.with_(engine=setting.engine.with_(quorum=1e-9, device="cpu"))
        job, server = make_job(setting, fed, folder=self._settings.checkpoints)
        forms = Forms(job, server)
        survivors = None if self._settings.secure is None else self._settings.secure.threshold
        noisy = {name: released(getattr(job.setting, name), survivors) for name in ("channel", "aggregator")}
        job = replace(job, setting=job.setting.with_(**noisy))
        none = Store(job.n, Nothing())
        return replace(job, clients=none, residue=none, optimizer=none, memory=None), server, forms

    def _release(self, job: Job, state: State) -> None:
        """Make sure that the next round stays within the budget, and enter it if the server adds the noise.

        Raises:
            RunStopped: it does not.
        """
        noise, limit = accounted(job.setting.channel, job.setting.aggregator), self._settings.epsilon
        try:
            if isinstance(noise, GaussianNoise | SharedMean):  # the sites have ledgers of their own
                after = spent(noise, job.setting.sampler, state.uploads + 1, state.round + 1)
                if limit is not None and after > limit:
                    raise Refused(f"round {state.round + 1} would make epsilon {after:.4g}, the limit is {limit:.4g}")
            else:
                Ledger(self._settings.checkpoints, noise, limit, "the run").release(state.round + 1)
        except Refused as error:
            raise RunStopped(Stop.BUDGET, str(error)) from error

    def _line(self, job: Job, state: State) -> str:
        text = f"fedloom: round {state.round}/{job.setting.rounds}: "
        text += f"{len(state.cohort)} of {len(self._post.members)} accepted"
        here = ((state.round, "train", "loss", False), (state.round, "train", "loss/mean", True))
        losses = [r for r in state.records.items if (r.round, r.part, r.metric, r.total) in here]
        return f"{text}, loss {torch.from_numpy(losses[-1].values).nanmean():.4g}" if losses else text


def _scored_before(state: State) -> bool:
    """Whether these models were scored: two sums of the same scores, of other sites, would tell their difference."""
    newest = max((r.round for r in state.records.items), default=-1)
    return all(any(n.startswith(_gone(t)) for n in state.notes) for t in range(newest + 1, state.round + 1))


def _gone(round: int) -> str:
    return f"round {round} was given up: "
