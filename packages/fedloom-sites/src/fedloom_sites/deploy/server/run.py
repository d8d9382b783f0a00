"""Server of a deployment. It runs the same rounds as a simulation, but its clients are real sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedloom.analyses.registry import ANALYSES, get_analysis_name
from fedloom.choose import SharesWeigher, Uniform, UniformWeigher
from fedloom.engine import Setting
from fedloom.engine.checkpoints import RunCheckpoints
from fedloom.engine.loop import Hooks, RunEnd, run_rounds
from fedloom.engine.privacy import check_privacy, find_accounted_noise, largest_epsilon
from fedloom.engine.records import Record
from fedloom.engine.scoring import make_records, score_models, score_request
from fedloom.engine.state import State, Times, initial_state
from fedloom.engine.virtual.check import check_stream
from fedloom.engine.virtual.clock import CLIENT_COLUMN, VERSION_COLUMN
from fedloom.errors import CheckpointError, DataError, FedloomError, GivenUp, Refused, RunStopped, Stop
from fedloom.lab.experiment import Experiment
from fedloom.local.oracles.precision import isolate_torch_settings
from fedloom.rows.channels import GaussianNoise
from fedloom.rundir import SUMMARY_FILE
from fedloom.schedule import Stream
from fedloom.storage import lock
from fedloom.storage.checkpoint import Checkpoints
from fedloom.version import __version__
from fedloom_sites.deploy.analyses import agreed_analyses
from fedloom_sites.deploy.audit import Audit
from fedloom_sites.deploy.code import read_agreed
from fedloom_sites.deploy.groups import GroupSums, agreed_groups, min_rows
from fedloom_sites.deploy.noise import SharedMean, remaining_noise
from fedloom_sites.deploy.ops.status import serve_metrics
from fedloom_sites.deploy.replay import make_server_job
from fedloom_sites.deploy.secure.member import check_maskable
from fedloom_sites.deploy.secure.sites import MaskedSites
from fedloom_sites.deploy.secure.vectors import count_earlier_bits
from fedloom_sites.deploy.server.analyses import AnalysisServer
from fedloom_sites.deploy.server.results import Results
from fedloom_sites.deploy.server.sites import Sites
from fedloom_sites.deploy.server.transport import Transport
from fedloom_sites.deploy.setting_files import check_version
from fedloom_sites.deploy.settings import Server
from fedloom_sites.deploy.site.ledger import Ledger
from fedloom_sites.transport.limits import check_real_clients

PrintFunction = Callable[[str], None]

STOP_PREFIX = "fedloom: stops: "
"""Beginning of the line that states why a run ended early."""
STOP_FILE = "stop"
"""File, next to the server's audit log, that requests the end of the run after the current round."""
STOP_HINT = "stopped by 'fedloom deploy stop'. To allow the next start: 'fedloom deploy stop FOLDER --undo'"
FINISHED_HINT = "all rounds are done. For more rounds, deploy an experiment with more rounds"


@isolate_torch_settings()
def serve_run(grid: Grid, settings: Server, say: PrintFunction = print) -> Stop:
    """Train at the sites until all rounds are done, and return the reason for the end.

    After a stop or a crash, the same call resumes the run.

    Args:
        grid: Flower's grid.
        settings: the server's settings.
        say: function that prints a line.

    Returns:
        Reason why the run ended.

    Raises:
        ConfigError: the experiment differs from the agreed experiment, or cannot be deployed.
        RunDirError: another server is already working on the same experiment.
        CheckpointError: the disk is full or cannot be written to, or no checkpoint can be read.
    """
    check_version(settings)
    experiment = read_agreed(settings, workers=1, clients_per_batch=1)
    masked, start = settings.secure is not None, settings.start is not None
    check_deployable(experiment, masked=masked, start=start, clients=settings.clients, verify=settings.verifies)
    with lock(settings.checkpoints):
        ended = finished_reason(settings)
        if ended is not None:
            say(f"fedloom: {finished_hint(ended)}")
            return ended
        with serve_metrics(settings):
            return _Run(grid, settings, experiment, say).go()


def stop_file(settings: Server) -> Path:
    """Return the path of the file that requests the end of a server's run."""
    return settings.audit.with_name(STOP_FILE)


def finished_reason(settings: Server) -> Stop | None:
    """Return the reason why a run has ended if its results are written and it cannot be resumed, otherwise None.

    A finished run no longer needs sites.

    Raises:
        CheckpointError: no checkpoint can be read.
        RunDirError: the checkpoints belong to a different experiment.
    """
    newest, stop = Checkpoints(settings.checkpoints).load(settings.fingerprint[:16]), recorded_stop(settings)
    if newest is None or stop is None or newest.meta["stop"] != stop.name or stop.is_resumable:
        return None
    return stop


def recorded_stop(settings: Server) -> Stop | None:
    """Return the summary's reason for the end of a run, or None if it has not ended or the summary is missing."""
    try:
        return Stop[json.loads((settings.results / SUMMARY_FILE).read_bytes())["stop"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finished_hint(stop: Stop) -> str:
    """Return a sentence about a run that ended for this reason and cannot be resumed."""
    if stop.status != "done":
        return f"the run has ended: {stop.value}. To train, deploy a corrected experiment"
    return FINISHED_HINT


def check_deployable(
    experiment: Experiment, *, masked: bool = False, start: bool = False, clients: int | None = None,
    verify: bool = False,
) -> None:  # fmt: skip
    """Raise an error for settings that only simulations support or, if ``masked``, that need individual uploads.

    Args:
        experiment: experiment to be deployed.
        masked: True for a run with secure aggregation.
        start: True if the agreement contains the digest of the file with the initial model.
        clients: number of sites in the experiment. None if the number is still unknown.
        verify: True if every site opens the masked sums itself (see `check_maskable`).

    Raises:
        ConfigError: the run cannot be deployed, or the schedule needs more sites than the experiment has. The message
            states the reason.
    """
    method = experiment.methods[0]
    if any(one.setting.attack is not None for one in experiment.methods):
        raise Refused(
            "attacks exist only in simulations",
            rule="deploy-attack",
            fix="omit {attack}, here and in [[method]], to deploy this experiment",
        )
    if method.setting.early_stop is not None:
        raise Refused(
            "early_stop works only in simulations",
            rule="deploy-early-stop",
            fix="omit {early_stop}, and set the number of rounds",
        )
    if experiment.common.evaluate.clients is not None:
        raise Refused(
            "evaluate.clients works only in simulations, because every real site scores models",
            rule="deploy-scored-clients",
            fix="omit {evaluate.clients} to deploy the experiment",
        )
    check_real_clients(method.label, method.setting, "real sites", streams=True)
    if method.setting.model.init_from is not None and not start:
        raise Refused(
            "model.init_from names a file on this machine, and nothing ensures that the sites have the same file",
            rule="deploy-model-file",
            fix="omit {model.init_from}, or use a function from a package that is installed at every "
            "site: {model.kind = 'package.module:function'}",
        )
    for analysis in experiment.analyses:
        if not analysis.by_sums and get_analysis_name(analysis) != "groups":
            name, summed = get_analysis_name(analysis), f"pooled-{get_analysis_name(analysis)}"
            what = "further runs" if analysis.runs_further else "rows or figures of single clients"
            raise Refused(
                f"the analysis {name!r} reads {what}, which sites do not send as sums",
                rule="deploy-analysis",
                fix=f"use the analysis {summed!r}"
                if summed in ANALYSES
                else "omit the table of this analysis to deploy the experiment",
            )
    setting = method.setting.resolved()
    check_stream(setting, clients)
    check_privacy(
        setting.method, setting.upload_transform, setting.aggregator, setting.sampler, setting.aggregation_weights
    )
    if masked:
        check_maskable(setting, verify=verify)


def sample_count_reason(setting: Setting) -> str:
    """Return the reason why a run needs every site's numbers of samples.

    Return "" if the run does not need to know these numbers.
    """
    plain = isinstance(setting.sampler, Uniform) and isinstance(
        setting.aggregation_weights, SharesWeigher | UniformWeigher
    )
    return (
        "client_weights = 'samples'"
        if setting.client_weights == "samples"
        else ""
        if plain
        else "the sampler or aggregation_weights"
    )


def last_round(settings: Server) -> tuple[int, dict[str, Tensor] | None]:
    """Return the number of finished rounds, and the global model of the newest checkpoint as a state dict.

    The model is None before the first round.

    Raises:
        Refused: the run has no complete global model.
        CheckpointError: no checkpoint can be read.
        RunDirError: the checkpoints belong to a different experiment.
    """
    loaded = Checkpoints(settings.checkpoints).load(settings.fingerprint[:16])
    if loaded is None or not loaded.meta["round"]:
        return 0, None
    experiment = read_agreed(settings, workers=1, clients_per_batch=1)
    sizes = torch.tensor(loaded.meta["more"]["sizes"])
    job, server, _ = make_server_job(settings, experiment, sizes, settings.checkpoints)
    state = initial_state(job, server).restored(loaded.meta["round"], loaded.tensors, [], Times())
    shared = job.algorithm.global_model(state.server)
    if shared is None or experiment.common.model.adapters is not None:
        what = "trains adapters" if shared is not None else f"has no global model ({experiment.methods[0].label})"
        raise Refused(
            f"the experiment {what}, so a new site has no initial model after round {state.round}",
            rule="deploy-initial-model",
            fix="start a new deployment of all sites: fedloom deploy init",
        )
    spec, samples = experiment.common.model, settings.samples
    module = spec.build(samples.shape, samples.outputs, experiment.head.seeds[0], samples.tokens)
    job.oracle.layout.load(module, shared.reshape(-1))
    return state.round, {key: part.contiguous() for key, part in module.state_dict().items()}


class _Run(Hooks):
    """A run with its state, and the steps before, between and after its rounds."""

    def __init__(self, grid: Grid, settings: Server, experiment: Experiment, say: PrintFunction) -> None:
        self._settings, self._experiment, self._say = settings, experiment, say
        self._audit = Audit(settings.audit)
        self._transport = Transport(grid, settings, self._audit, say)
        self._results = Results(settings, experiment)
        secure, self.robust_losses = settings.secure, True
        self._streams = isinstance(experiment.methods[0].setting.schedule, Stream)  # sites receive messages one by one
        no_place = secure is not None and secure.scores == "per-site"  # masked sums contain no site's own scores
        self.scores_with_training = not (no_place or self._streams)

    def go(self) -> Stop:
        """Start or resume the run, and return the reason why it ended."""
        self._audit.write("wait", release=__version__)
        try:
            if self.interrupted():
                raise RunStopped(Stop.INTERRUPTED, STOP_HINT)
            self._wait_for_sites()
            end = self._run()
        except RunStopped as error:
            stop, detail, diverged = error.reason, error.detail, None
        except FedloomError as error:
            with suppress(CheckpointError):  # the disk with the log may also be full
                self._audit.write("stop", reason=str(error))
            raise
        else:
            _, stop, detail, diverged = end
            detail = STOP_HINT if stop is Stop.INTERRUPTED and self.interrupted() else detail
        if stop is not Stop.DONE and diverged is None:
            self._say(f"{STOP_PREFIX}{RunStopped(stop, detail)}")
        self._audit.write("stop", reason=stop.value, detail=detail or None)
        self._results.summary(stop, detail, self._transport.nodes, diverged)
        return stop

    def interrupted(self) -> bool:
        """Return True if the operator has requested the end of the run."""
        return stop_file(self._settings).exists()

    def _run(self) -> RunEnd:
        """Run the remaining rounds, and return the reason for the end."""
        settings, audit = self._settings, self._audit
        sizes, folder = self._transport.sizes, settings.checkpoints
        job, server, forms = make_server_job(settings, self._experiment, sizes, folder)
        checkpoints = RunCheckpoints(job, settings.checkpoints, settings.fingerprint[:16], every_round=True)
        groups = GroupSums(job, agreed_groups(self._experiment, settings.samples), min_rows(self._experiment))
        sites = (Sites if settings.secure is None else MaskedSites)(job, forms, self._transport, settings, groups)
        self._job, self._sites = job, sites
        state, stop, detail, diverged, extras = checkpoints.resume(initial_state(job, server))
        if extras:
            sites.accepted = torch.tensor(extras["accepted"])
            self._say(f"fedloom: resumes after round {state.round}")
        for note in job.notes:
            self._say(f"fedloom: {note}")
        audit.write("start", round=state.round, release=__version__, sites=sorted(self._transport.nodes))
        end = RunEnd(state, stop, detail, diverged) if stop else run_rounds(job, self._sites, checkpoints, self, state)
        if end.state.records.items:
            self._results.tables(job, end.state)
        if end.stop in (Stop.DONE, Stop.DIVERGED):
            self._run_analyses(end.state)
        return end

    def _run_analyses(self, state: State) -> None:
        """Compute the agreed sum-based analyses. An analysis without a result is reported in a note.

        Raises:
            RunStopped: sites are missing. Calling the method again continues the analyses.
        """
        settings, first = self._settings, 0
        if settings.secure is not None:
            first = count_earlier_bits(self._job, self._sites.group_sums.groups)
        agreed = agreed_analyses(self._experiment, settings.samples, settings.clients, settings.survivors, first)
        sites = {member.client: member.site for member in settings.sites}
        names = [sites.get(client, str(client)) for client in range(settings.clients)]
        for name, one in agreed.items():
            try:
                request = score_request(self._job, state) if one.analysis.uses_models else None
                if one.analysis.uses_models and request is None:
                    raise Refused("the run computes no scores of models")
                end = AnalysisServer(self._sites, one, settings.checkpoints, request, names).run()
            except (DataError, GivenUp, Refused) as error:
                self._say(f"fedloom: no result of the analysis {name}: {error}")
                self._audit.write("no result", analysis=name, reason=str(error))
                continue
            self._results.analysis(name, end.table)
            rows = max((record.info.rows for record in end.log), default=0)
            self._say(f"fedloom: analysis {name}: {rows} rows, {len(end.log)} questions")
            self._audit.write("analysis", analysis=name, questions=len(end.log), rows=rows)

    def prepare_round(self, state: State) -> RunStopped | None:
        """Check that the next round stays within the budget and, if the server adds the noise, record the round.

        Return the reason to stop if the budget is too small, and None otherwise.
        """
        self._results.hold(self._job, state)
        setting, t = self._job.setting, state.round + 1
        noise, limit = find_accounted_noise(setting.upload_transform, setting.aggregator), self._settings.epsilon
        try:
            if isinstance(noise, GaussianNoise | SharedMean):  # each site has its own ledger
                after = largest_epsilon(noise, setting.sampler, state.uploads + 1, t)
                if limit is not None and after > limit:
                    raise Refused(f"round {t} would raise epsilon to {after:.4g}, but the limit is {limit:.4g}")
            else:
                Ledger(self._settings.checkpoints, noise, limit, "the run", least=t - 1 if noise else 0).release(t)
        except Refused as error:
            return RunStopped(Stop.BUDGET, str(error))
        return None

    def ask_for_scores(self, state: State) -> None:
        request = score_request(self._job, state)
        if request is not None:
            self._sites.score_with_training(request)

    def evaluate(self, state: State) -> tuple[State, str]:
        records = [*make_records(self._job, state, score_models(self._job, self._sites, state))]
        sums = self._sites.sums(state.round)
        records += [
            Record.make_federation_record(state.round, model, part, name, value) for model, part, name, value in sums
        ]
        state = state.with_(records=state.records.plus(records))
        self._results.tables(self._job, state)
        if state.round == self._job.setting.rounds:
            self._results.groups(self._sites.groups())
        self._results.summary(None, "", self._transport.nodes)
        return state, ""

    def diverges(self, state: State, sentence: str) -> None:
        self._say(f"fedloom: diverges: {sentence}; the run continues")
        self._audit.write("diverges", round=state.round, reason=sentence)

    def trained(self, state: State) -> tuple[str, ...]:
        if state.clock is None:
            self._sites.accepted[state.cohort] = state.round
            return ()
        log = state.clock.used_in(state.round)
        clients, versions = (torch.from_numpy(log[:, k].astype("int64")) for k in (CLIENT_COLUMN, VERSION_COLUMN))
        self._sites.accepted[clients] = versions + 1
        staleness = dict(zip(clients.tolist(), (state.round - 1 - versions).tolist(), strict=True))
        self._transport.step(state.round, staleness)
        return ()

    def record_failure(self, state: State, error: GivenUp) -> None:
        self._transport.note("given up", state.round, error.clients, str(error))

    def review_round(self, state: State) -> str | None:
        self._say(self._line(state))
        return None

    def extras(self, state: State) -> dict[str, Any]:
        setting, accepted = self._job.setting, self._sites.accepted
        noise = find_accounted_noise(setting.upload_transform, setting.aggregator)
        costs = {
            name: None if one is None else largest_epsilon(one, setting.sampler, state.uploads, state.round)
            for name, one in {"epsilon": noise, "epsilon_sites": remaining_noise(noise)}.items()
        }
        return {"accepted": accepted.tolist(), "sizes": self._transport.sizes.tolist(), **costs}

    def _wait_for_sites(self) -> None:
        """Wait for the sites. The numbers of samples known at the start of the run remain valid."""
        sizes = self._checkpoint_sizes()
        if sizes is not None:
            self._transport.sizes.copy_(sizes)
            self._transport.presence.fix_sizes()
        by = sample_count_reason(self._experiment.methods[0].setting.resolved())
        by = by or ("verify" if self._settings.verifies else "")
        self._transport.gather(by if sizes is None else "")

    def _checkpoint_sizes(self) -> Tensor | None:
        """Return the sizes stored in the newest checkpoint, or None if no checkpoint exists."""
        loaded = Checkpoints(self._settings.checkpoints).load(self._settings.fingerprint[:16])
        return None if loaded is None or not loaded.meta["more"] else torch.tensor(loaded.meta["more"]["sizes"])

    def _line(self, state: State) -> str:
        text = f"fedloom: round {state.round}/{self._job.setting.rounds}: "
        text += f"{len(state.cohort)} of {len(self._transport.members)} accepted"
        means = [(state.round, "train", f"loss/{mean}", True) for mean in ("weighted", "mean")]
        figures = ((state.round, "train", "loss", False), *means)
        losses = [r for r in state.records.items if (r.round, r.part, r.metric, r.total) in figures]
        return f"{text}, loss {torch.from_numpy(losses[-1].values).nanmean():.4g}" if losses else text
