"""Main loop: rounds, their evaluation and their checkpoints, in a simulation and in a deployment."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from fedloom.engine.checkpoints import RunCheckpoints
from fedloom.engine.job import Job
from fedloom.engine.records import Divergence
from fedloom.engine.round import run_round
from fedloom.engine.state import State
from fedloom.engine.virtual.advance import advance
from fedloom.errors import GivenUp, RunStopped, Stop, write_singular
from fedloom.processes.clients import Clients


class End(NamedTuple):
    """How a run ended.

    Attributes:
        state: the run after its last round.
        stop: reason why the run ended.
        detail: round, clients and numbers of an early end.
        diverged: round by which the run had diverged, for a run that still continued to its end.
    """

    state: State
    stop: Stop
    detail: str = ""
    diverged: int | None = None


class Hooks:
    """Actions that a kind of run takes around its rounds. This base class does nothing.

    Attributes:
        scores_with_training: True if clients evaluate the models of a round together with the next training, in a
            single message.
        robust_losses: True if divergence is judged by the median of the clients' losses, and not by their mean.
        pause: round after which the run is evaluated and interrupted. None: the run continues.
    """

    scores_with_training = False
    robust_losses = False
    pause: int | None = None

    def prepare_round(self, state: State) -> RunStopped | None:
        """Prepare the next round. Return the reason why the next round must not start, or None."""
        return None

    def ask_for_scores(self, state: State) -> None:
        """Let the next training also return the scores of this state, which `evaluate` then uses."""

    def evaluate(self, state: State) -> tuple[State, str]:
        """Return the state with its scores in the records, and a sentence if the run cannot continue with them."""
        return state, ""

    def trained(self, state: State) -> tuple[str, ...]:
        """Record a round that changed the server's state. Return sentences for the run's notes."""
        return ()

    def diverges(self, state: State, sentence: str) -> None:
        """Record that a run diverges but continues."""

    def record_failure(self, state: State, error: GivenUp) -> None:
        """Record a round that changes nothing."""

    def review_round(self, state: State) -> str | None:
        """Inspect a round after its scores are known. If a sentence is returned, the run ends."""
        return None

    def interrupted(self) -> bool:
        """Return True if the user wants to stop the run and resume it later."""
        return False

    def extras(self, state: State) -> dict[str, Any]:
        """Return the JSON values that a checkpoint stores in addition to the state."""
        return {}


def run_rounds(job: Job, clients: Clients, checkpoints: RunCheckpoints, hooks: Hooks, state: State) -> End:
    """Run the remaining rounds, and save the end.

    A run has trained nothing if it used no upload or changed no loss. Such a run has failed, however many rounds have
    passed. A round that fails changes nothing: the end contains the state before this round. If such an end can be
    resumed, no checkpoint is written, and the run resumes from the newest checkpoint.

    Raises:
        ClientError: the method's code failed.
        CheckpointError: a checkpoint cannot be written.
    """
    loop = _Loop(job, clients, checkpoints, hooks, state)
    saves = True
    try:
        stop, detail = loop.run()
    except RunStopped as error:
        stop, detail, saves = error.reason, error.detail, not error.reason.resumable
        loop.state = loop.state.with_(notes=(*loop.state.notes, *error.events))
    state, diverged = loop.state, None
    loop.divergence.read(state.records, ended=True)
    if stop in (Stop.DONE, Stop.STOPPED) and loop.divergence.round is not None:
        stop, diverged = Stop.DIVERGED, loop.divergence.round
        detail = "; ".join(filter(None, (loop.divergence.sentence, detail)))
    if stop in (Stop.DONE, Stop.STOPPED) and state.round and not state.trained:
        unused = f"no upload was used in any of {state.round} rounds, so nothing was trained"
        stop, detail = Stop.UNUSABLE, write_singular("; ".join(filter(None, (unused, detail))))
    elif stop in (Stop.DONE, Stop.STOPPED) and state.round and state.records.is_unchanged(job.oracle.dtype):
        same = f"after {state.round} rounds every loss is unchanged, except for rounding errors"
        stop, detail = Stop.UNCHANGED, write_singular("; ".join(filter(None, (same, detail))))
    if saves:
        checkpoints.save(state, stop, detail, diverged, **hooks.extras(state))
    return End(state, stop, detail, diverged)


class _Loop:
    """A run in progress. `state` is the newest state after a complete round or evaluation."""

    def __init__(self, job: Job, clients: Clients, checkpoints: RunCheckpoints, hooks: Hooks, state: State) -> None:
        self._job, self._clients, self._checkpoints, self._hooks = job, clients, checkpoints, hooks
        self.state, self.divergence, self._begun = state, Divergence(robust=hooks.robust_losses), state.round
        self.divergence.read(state.records)
        self._step = run_round if state.clock is None else advance

    def run(self) -> tuple[Stop, str]:
        """Run to the end. The reason why the run ends, with details.

        Raises:
            RunStopped: the run ends within a round or an evaluation.
        """
        hooks, rounds, every = self._hooks, self._job.setting.rounds, self._job.setting.evaluate.every
        while True:
            last = self.state.round >= rounds
            due = not self.state.is_scored and (last or self.state.round % every == 0)
            blocked = None if last else hooks.prepare_round(self.state)
            if due and (last or blocked is not None or not hooks.scores_with_training):
                self._evaluate()
                due = False
            sentence = None if due else self._review_round(self.state)
            if blocked is not None:
                raise blocked
            if last:
                return Stop.DONE, ""
            if self.state.round > self._begun:
                stopped, interrupted, save = self._job.ranks.any(
                    sentence is not None, hooks.interrupted(), self._checkpoints.is_due()
                )
                if stopped:
                    if not self.state.is_scored:
                        self._evaluate()
                    return Stop.STOPPED, sentence or ""
                if self.state.round == hooks.pause:
                    if not self.state.is_scored:
                        self._evaluate()
                    return Stop.INTERRUPTED, ""
                if interrupted:
                    return Stop.INTERRUPTED, ""
                if save:
                    self._save()
            if due:
                self._train_and_score()
            else:
                self.state = self._trained(self.state)
            if self._checkpoints.every_round:
                self._save()

    def _train_and_score(self) -> None:
        """Train a round whose messages also contain the scores of the previous round."""
        before = self.state
        self._hooks.ask_for_scores(before)
        try:
            state = self._trained(before)
        except RunStopped:
            self._review_round(before)
            raise
        scored, _ = self._evaluated(before)
        self.state = state.with_(records=scored.records)
        self._review_round(scored)

    def _trained(self, before: State) -> State:
        """Return the state after the next round."""
        start = time.perf_counter()
        try:
            state, events = self._step(self._job, self._clients, before)
            events += self._hooks.trained(state)
        except GivenUp as error:
            state, events = _abandon_round(before, error), (f"round {before.round + 1} was given up: {error}",)
            self._hooks.record_failure(state, error)
        times = state.times.add_round(time.perf_counter() - start)
        return state.with_(notes=(*state.notes, *events), times=times)

    def _evaluate(self) -> None:
        """Score the state.

        Raises:
            RunStopped: the run cannot continue with these scores.
        """
        self.state, unusable = self._evaluated(self.state)
        if unusable:
            raise RunStopped(Stop.DIVERGED, unusable)

    def _evaluated(self, state: State) -> tuple[State, str]:
        start = time.perf_counter()
        scored, unusable = self._hooks.evaluate(state)
        if sentence := self.divergence.read(scored.records):
            self._hooks.diverges(scored, sentence)
        return scored.with_(times=scored.times.add_evaluation(time.perf_counter() - start)), unusable

    def _review_round(self, state: State) -> str | None:
        """Report a round of this process to the hooks."""
        return self._hooks.review_round(state) if state.round > self._begun else None

    def _save(self) -> None:
        self._checkpoints.save(self.state, **self._hooks.extras(self.state))


def _abandon_round(before: State, error: GivenUp) -> State:
    """Return the state after a round without a result, which is unchanged except for its privacy cost."""
    clients = torch.tensor(error.clients)
    return before.with_(round=before.round + 1, tally=before.tally.plus(clients))
