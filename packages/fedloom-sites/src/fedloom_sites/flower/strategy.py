"""A method of fedloom as a Flower strategy."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from torch import nn

from fedloom.data.input_spec import InputSpec
from fedloom.engine import Setting
from fedloom.engine.checkpoints import RunCheckpoints
from fedloom.engine.job import Job
from fedloom.engine.round import run_round
from fedloom.engine.scoring import score_request
from fedloom.engine.setup import make_job
from fedloom.engine.state import State, initial_state
from fedloom.errors import ConfigError, RunStopped, Stop, adapt_wording
from fedloom.local.oracles.precision import isolate_torch_settings
from fedloom.rundir import as_path
from fedloom.trained.model import running_statistics
from fedloom.values import dump_value
from fedloom_sites.deploy.noise import deployed_setting
from fedloom_sites.deploy.site.local_data import make_blank_federation
from fedloom_sites.flower.clients import FlowerClients, RememberingClients
from fedloom_sites.flower.documents import (
    PRIVACY_HINT,
    check_counts,
    document_of,
    read_setting,
    refuse_privacy,
    resolved_document,
)
from fedloom_sites.flower.members import RunMembers, SavedRun, collect_introductions, read_run, write_run
from fedloom_sites.flower.records import describe_shapes, log, read_state_dict
from fedloom_sites.flower.samples import Signature, adapt_module
from fedloom_sites.transport.forms import Forms
from fedloom_sites.transport.limits import check_real_clients

ROUND_KEY = "server-round"
"""Key for the round in the configs of Flower's strategies."""
CONFIG_HINTS = {
    "train_config": "give local={'lr': ...} to the strategy",
    "evaluate_config": "for your own scores, add @app.evaluate('mine') to the nodes",
}
"""Advice on what to use instead of Flower's configs."""
LONG_RUN_ROUNDS = 1000
"""Number of rounds in a second trial setting, which reveals the options that depend on the number of rounds."""


class Strategy(FlowerStrategy):
    """The server side of a fedloom method in a Flower app whose nodes use `fedloom_sites.flower.client`.

    Args:
        algorithm: the method's name in ``fl.algorithms.REGISTRY``.
        model: the module, which must be the same as at the nodes. The values in ``initial_arrays`` are used instead of
            its own values.
        min_nodes: minimum number of nodes to wait for before the first round. All nodes that are present at that time
            form the federation.
        wait: number of seconds to wait for the nodes.
        evaluate_every: number of rounds between two evaluations at the nodes, or 0 for no evaluation.
        folder: folder for the run's checkpoint, which is written after every round. Calling `start` with the folder of
            an interrupted run resumes the run with the same nodes. If None, no checkpoint is written.
        choices: ``local``, ``sampler``, ``aggregation_weights``, ``personalized_aggregation``, ``aggregator``,
            ``upload_transform``, ``client_weights``, ``seed``, ``augment`` or ``engine``, as in an experiment file or
            `fedloom.Setting`. All other arguments are options of the method.

    Attributes:
        state: state of the run after the latest round (`fedloom.engine.state.State`). None before the first round.
        client_metrics: metrics of every client, keyed by evaluated round.

    Raises:
        ConfigError: a method, an option or a choice is unknown.
        Refused: the method cannot be computed by real nodes.
    """

    @isolate_torch_settings()
    @adapt_wording("flower")
    def __init__(
        self, algorithm: str, model: nn.Module, *, min_nodes: int = 2, wait: float = 3600.0, evaluate_every: int = 1,
        folder: Path | str | None = None, **choices: object,
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a module, such as Net(), got {model!r:.80}")
        check_counts(min_nodes=(min_nodes, 1), evaluate_every=(evaluate_every, 0))
        if type(wait) not in (int, float) or wait < 0:
            raise ConfigError(f"wait must be a number of seconds, got {wait!r:.80}")
        self._document = document_of(algorithm, choices)
        self._name, self._model = algorithm, copy.deepcopy(model)
        self._min_nodes, self._wait, self._every = min_nodes, wait, evaluate_every
        self._folder = None if folder is None else as_path(folder, "folder", ", or None for no checkpoint")
        self._rounds, self._before, self._timeout, self._writes = 0, 0, wait, True  # set by `start`
        self._asked = 0
        check_real_clients(algorithm, read_setting(self._document, self._model, 1), "nodes")
        self._clients: FlowerClients | None = None
        self._job: Job | None = None
        self._unread = set[tuple[str, str]]()
        self._current: list[ArrayRecord] = []  # arrays that Flower's loop may pass: the first and the newest
        self.state: State | None = None
        self.client_metrics: dict[int, dict[int, dict[str, float]]] = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds and return the result (see ``flwr.serverapp.strategy.Strategy.start``).

        An interrupted run continues with the remaining rounds.

        Local training uses the strategy's ``local`` settings. The configs are still sent, but fedloom does not read
        them.

        Returns:
            Flower's result. Rounds are counted from the first round of the run.

        Raises:
            ConfigError: too few matching nodes are present, or the folder contains a different run.
            RunStopped: every node rejected a round, a round diverged, no reply was used in any round, or the global
                model is the initial one, so nothing was trained.
        """
        check_counts(num_rounds=(num_rounds, 1))
        self._unread = set[tuple[str, str]]()
        for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
            self._warn_of_unread(name, config or ConfigRecord())
        self._rounds, self._timeout = num_rounds, timeout
        check_real_clients(self._name, read_setting(self._document, self._model, num_rounds), "nodes")
        self._clients = self._job = None
        self._before = done = self._begin(initial_arrays, grid).round
        if (newest := self._arrays()) is None:
            log(
                WARNING,
                "fedloom: %s has no global model, so result.arrays is empty. The nodes have the models",
                self._name,
            )
            if evaluate_fn:
                log(WARNING, "fedloom: evaluate_fn is not called, because it scores a global model")
                evaluate_fn = None
        elif running_statistics(self._model):
            log(
                WARNING,
                "fedloom: no message contains statistics of normalization layers, so evaluate_fn and "
                "result.arrays use the statistics of initial_arrays. Before scoring, run the model "
                "on samples in training mode, or use client_metrics",
            )
        arrays = newest if done and newest else initial_arrays
        self._current = [arrays]
        if done:
            log(INFO, "fedloom: resumed after round %s of %s", done, num_rounds)
        shifted = evaluate_fn and (lambda t, arrays: _check_scores(evaluate_fn(t + done, arrays)))
        left, self._writes = max(num_rounds - done, 0), evaluate_fn is not None or type(self) is not Strategy
        try:
            result = super().start(grid, arrays, left, timeout, train_config, evaluate_config, shifted)
        finally:
            self._writes = True
        if self.state is not None and self.state.round and not self.state.trained:
            raise RunStopped(
                Stop.UNUSABLE,
                f"fedloom could not use any reply in {self.state.round} rounds, so no model was "
                "trained. The log states the reasons",
            )
        if self.state is not None and self.state.round and self._is_unchanged(initial_arrays):
            raise RunStopped(
                Stop.UNCHANGED,
                f"after {self.state.round} rounds the global model equals the initial model, except for rounding "
                "errors. Check the learning rate and the loss",
            )
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {t + done: figures for t, figures in getattr(result, name).items()})
        result.arrays = self._arrays() or ArrayRecord()
        return result

    @isolate_torch_settings()
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the cohort for the next round, and return the messages to it.

        Raises:
            ConfigError: Flower's differential privacy wraps this strategy, or the arrays do not come from it.
        """
        refuse_privacy(config)
        self._warn_of_unread("train_config", config)
        if self._clients is None:
            self._begin(arrays, grid)
            self._current = [arrays]
        if not any(arrays is record or arrays == record for record in self._current):
            raise ConfigError(
                f"round {server_round}: the arrays differ from those that aggregate_train returned, and nodes would "
                f"train from them. A wrapper or subclass of this strategy must not change them; {PRIVACY_HINT}"
            )
        clients, job, state = self._running
        server_round += self._before
        self._update_connected_nodes(grid)
        sent: list[Message] = []

        def note(messages: Iterable[Message]) -> Iterable[Message]:
            messages = list(messages)
            if messages[0].metadata.message_type != "train":
                return list(grid.send_and_receive(messages, timeout=self._timeout))
            sent.extend(messages)
            raise _Configured

        self._answers = RememberingClients(clients.replace_sender(note))
        with suppress(_Configured, RunStopped):  # `aggregate_train` reports a round that stops
            run_round(job, self._answers, state)
        for message in sent:
            message.content["config"] = ConfigRecord({**config, ROUND_KEY: server_round})
        self._asked = len(sent)
        log(INFO, "configure_train: %s nodes (out of %s)", len(sent), job.n)
        return sent

    @isolate_torch_settings()
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the usable replies, and return the global model and the round's counts.

        With too few replies, the state of the run does not change.

        Returns:
            The global model, or None before the last round if nothing reads it (i.e. without an ``evaluate_fn`` or
            functions of a subclass). The round's counts are also returned, or None if there are too few replies.

        Raises:
            RunStopped: every node in the cohort rejected the round or sent an upload that is not finite, or the
                server's state is not finite. Repeating the request would not help.
        """
        clients, job, before = self._running
        arrived = list(replies)
        answering = clients.replace_sender(lambda _messages: arrived)
        replaying = self._answers.replaying(answering)
        try:
            state, events = run_round(job, replaying, before)
        except RunStopped as error:
            if 0 < self._asked <= len(answering.refusals):
                first, reason = next(iter(answering.refusals.items()))
                raise RunStopped(
                    Stop.FAILED,
                    f"round {before.round + 1}: all {self._asked} nodes rejected the request. Node "
                    f"{self._members[first]}: {reason}",
                ) from error
            if error.reason is Stop.DIVERGED and 0 < self._asked <= len(answering.uploaded):
                raise
            none = f"round {before.round + 1}: none of its nodes answered"
            log(WARNING, "fedloom: nothing changes in %s", error.detail if arrived else none)
            self.state = before.with_(round=before.round + 1)
            self._save()
            return None, None
        for event in events:
            log(INFO, "fedloom: %s", event)
        self.state = state.with_(notes=(*state.notes, *events))
        clients.accepted[state.cohort] = state.round
        self._save()
        counts = (state.totals - before.totals).tolist()
        metrics = MetricRecord({"accepted": len(state.cohort), "dropped": counts[-1], "samples-backward": counts[0]})
        arrays = self._arrays() if self._writes or state.round >= self._rounds else None
        self._current[1:] = [] if arrays is None else [arrays]
        return arrays, metrics

    @isolate_torch_settings()
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests for the scores of all nodes' models.

        Returns:
            One request for each node. In a round without an evaluation, the list is empty.
        """
        if self._job is None or self._clients is None or self.state is None:
            return []
        self._warn_of_unread("evaluate_config", config)
        server_round += self._before
        last = 0 < self._rounds <= server_round
        request = score_request(self._job, self.state) if self._every else None
        if request is None or not (last or server_round % self._every == 0):
            return []
        self._request = request
        self._update_connected_nodes(grid)
        sent = list(self._clients.score_messages(request))
        for message in sent:
            message.content["config"] = ConfigRecord({**config, ROUND_KEY: server_round})
        return sent

    @isolate_torch_settings()
    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the mean scores, weighted by the nodes' numbers of samples, or None if there was no evaluation.

        Returns:
            The means, keyed by ``model/part/metric``. None if nothing is evaluated in the round.
        """
        arrived = list(replies)
        if not arrived or self._clients is None or self._job is None:
            return None
        clients = self._clients.replace_sender(lambda _messages: arrived)
        list(clients.score(self._request))
        self.client_metrics[server_round + self._before] = clients.scores
        sizes = {part: self._job.eval_fed.sizes(part).double() for part in ("train", "validation", "test")}
        figures: dict[str, int | float | list[int] | list[float]] = {}
        for key in sorted({key for scores in clients.scores.values() for key in scores if key.count("/") == 2}):
            weights = {c: float(sizes[key.split("/")[1]][c]) for c, scores in clients.scores.items() if key in scores}
            total = sum(weights.values())
            if total:
                figures[key] = sum(w * clients.scores[c][key] for c, w in weights.items()) / total
        return MetricRecord(figures) if figures else None

    def initialize_parameters(self, client_manager: object) -> None:
        """Raise an error in Flower's older server, which calls this function of its strategies.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "fedloom_sites.flower.Strategy belongs to Flower's message API, but this server uses the "
            "older API with server_fn or start_server. Call strategy.start(grid, arrays) in a "
            "function under @app.main() of a ServerApp"
        )

    def summary(self) -> None:
        """Log the method and its choices."""
        log(INFO, "\t├──> fedloom: %s", self._document)

    @isolate_torch_settings()
    @adapt_wording("flower")
    def _begin(self, arrays: ArrayRecord, grid: Grid) -> State:
        """Find the run's nodes, build the job from the descriptions of their samples, and return the initial state."""
        self._model.load_state_dict(read_state_dict(arrays, self._model))
        parameters = describe_shapes(self._model)
        saved = None if self._folder is None else read_run(self._folder)
        members, schema, signature = self._collect_introductions(grid, parameters, saved)
        if self._folder is not None and saved is None:
            write_run(self._folder, SavedRun(members, schema, signature, self._document, parameters))
        setting = read_setting(self._document, adapt_module(self._model, signature), max(self._rounds, 1))
        setting = setting.with_(
            engine=setting.engine.with_(quorum=1e-9, device="cpu", workers=1, clients_per_batch=1),
            evaluate=setting.evaluate.with_(batchnorm_stats="own"),  # nodes score with their own statistics
        )
        fed = make_blank_federation(schema, torch.tensor(members.sizes))
        job, server = make_job(setting, fed)
        if not self._rounds:
            _warn_of_rounds(self._name, job.setting, make_job(setting.with_(rounds=LONG_RUN_ROUNDS), fed)[0].setting)
        forms = Forms(job, server, dense=True)
        self._job = replace(job, setting=deployed_setting(job.setting)).drop_states()
        document = resolved_document(job.setting)
        self._clients = FlowerClients(
            self._job, forms, members.roll(), members.run, document, parameters, grid.send_and_receive
        )
        self._checkpoints = RunCheckpoints(self._job, self._folder, members.run)
        resumed = self._checkpoints.resume(initial_state(self._job, server))
        self.state = resumed.state
        self.client_metrics = {t: scores for t, scores in self.client_metrics.items() if t <= self.state.round}
        self._clients.accepted += torch.tensor(resumed.extras.get("accepted", 0))
        for note in job.notes:
            log(INFO, "fedloom: %s", note)
        return self.state

    @property
    def _running(self) -> tuple[FlowerClients, Job, State]:
        """Clients, job and state of a run.

        Raises:
            ConfigError: no run has started yet.
        """
        if self._clients is None or self._job is None or self.state is None:
            raise ConfigError(
                "no round has started. Call configure_train, which sends the messages of a round, or start"
            )
        return self._clients, self._job, self.state

    def _warn_of_unread(self, name: str, config: ConfigRecord) -> None:
        """Log a warning, once per key, that the key has no effect."""
        keys = [key for key in config if key != ROUND_KEY and (name, key) not in self._unread]
        self._unread |= {(name, key) for key in keys}
        if keys:
            log(
                WARNING,
                "fedloom: %s contains %s, which nodes do not read; %s",
                name,
                ", ".join(map(repr, keys)),
                CONFIG_HINTS[name],
            )

    def _update_connected_nodes(self, grid: Grid) -> None:
        """Update which of the run's nodes are connected."""
        clients, *_ = self._running
        for node in clients.roll.connect({*grid.get_node_ids()}):
            log(WARNING, "fedloom: node %s has disconnected. The run continues without it until it is back", node)

    def _save(self) -> None:
        """Write a checkpoint if the run has a folder."""
        clients, _, state = self._running
        if self._folder is not None:
            self._checkpoints.save(state, accepted=clients.accepted.tolist())

    def _collect_introductions(
        self, grid: Grid, parameters: str, saved: SavedRun | None
    ) -> tuple[RunMembers, InputSpec, Signature]:
        """Ask the nodes to introduce themselves, and return them with descriptions of their samples.

        Args:
            grid: Flower's connection to the nodes.
            parameters: parameters of the server's model.
            saved: the run to resume. If None, a new run starts.

        Raises:
            ConfigError: too few matching nodes are present, or the folder contains a different run.
        """
        if saved is not None:
            saved.check(self._document, parameters, self._folder)
        introduced = collect_introductions(grid, parameters, saved, self._min_nodes, self._wait, self._timeout)
        self._members = [*introduced]
        if saved is not None:
            return saved.members, saved.schema, saved.signature
        first = introduced[self._members[0]]
        sizes, run = [node.sizes for node in introduced.values()], ""
        if self._folder is not None:
            run = secrets.token_hex(8)
        return RunMembers(self._members, sizes, run), first.schema, first.signature

    @isolate_torch_settings()
    def _is_unchanged(self, initial_arrays: ArrayRecord) -> bool:
        """Return True if the run trains only a global model, and this model is unchanged."""
        newest = self._arrays()
        if newest is None or self._running[1].has_personal:
            return False
        before, after = (
            torch.cat([torch.from_numpy(arrays[name].numpy()).double().flatten() for name in newest])
            for arrays in (initial_arrays, newest)
        )
        return float((after - before).norm()) <= torch.finfo(torch.float32).eps * float(before.norm())

    def _arrays(self) -> ArrayRecord | None:
        """Return the global model as a state dict, or None if the method has no global model."""
        _, job, state = self._running
        row = job.algorithm.global_model(state.server)
        if row is None:
            return None
        parameters, trained = dict(self._model.named_parameters()), job.oracle.layout.tree(row)
        new = {id(parameters[name]): value for name, value in trained.items()}  # tied parameters have several names
        values = self._model.state_dict(keep_vars=True)
        current = {name: new.get(id(old), old.detach()).to(old) for name, old in values.items()}
        none_in_numpy = torch.bfloat16
        return ArrayRecord(
            {k: value.float() if value.dtype == none_in_numpy else value for k, value in current.items()}
        )


def _warn_of_rounds(name: str, setting: Setting, longer: Setting) -> None:
    """Log a warning about options that depend on the number of rounds, which is unknown in an app's own loop."""
    options, of_many = dump_value(setting.method), dump_value(longer.method)
    derived = {key: value for key, value in options.items() if value != of_many.get(key)}
    if derived:
        cure = f"Strategy({name!r}, ..., {'=..., '.join(derived)}=...)"
        why = "follows from the number of rounds, which only start knows, so this value is for one round"
        log(WARNING, "fedloom: %s %s. Set it: %s", derived, why, cure)


def _check_scores(answer: object) -> MetricRecord | None:
    """Check the result of an ``evaluate_fn``, and return it, or None if the function returned None.

    Raises:
        ConfigError: the result is not a record.
    """
    if answer is None or isinstance(answer, MetricRecord):
        return answer
    raise ConfigError(
        f"evaluate_fn must return a MetricRecord or None, got {answer!r:.80}. Return MetricRecord({{'accuracy': ...}})"
    )


class _Configured(Exception):
    """Exception that signals that the messages of a round have been configured. The replies arrive at a later time."""
