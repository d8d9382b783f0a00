"""Main loop of a run in a simulation or deployment: rounds, evaluation, and checkpoints."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from fedloom.engine.checkpoints import RunCheckpoints
from fedloom.engine.checks.learnable import learns_from_events
from fedloom.engine.job import Job
from fedloom.engine.records import NEGLIGIBLE_STEP_UNITS, ROUNDING_UNITS, Divergence
from fedloom.engine.round import run_round
from fedloom.engine.state import State
from fedloom.engine.virtual.advance import advance_to_server_step
from fedloom.errors import GivenUp, RunStopped, Stop, write_singular
from fedloom.processes.clients import Clients


class RunEnd(NamedTuple):
    """Final state of a run and the reason why it ended.

    Attributes:
        state: state after the last round.
        stop: reason why the run ended.
        detail: round, clients and numbers that explain an early end, as text.
        diverged: round in which divergence was detected, if the run still continued to its end.
    """

    state: State
    stop: Stop
    detail: str = ""
    diverged: int | None = None


class Hooks:
    """Hooks that a simulation or a deployment runs before and after each round.

    The methods of this base class have no effect.

    Attributes:
        scores_with_training: True if the message that requests training also requests the scores of the last round.
        robust_losses: True if divergence is detected by the median of the clients' losses instead of their mean.
        pause: last round before the run is evaluated and interrupted. None if the run is not interrupted.
    """

    scores_with_training = False
    robust_losses = False
    pause: int | None = None

    def prepare_round(self, state: State) -> RunStopped | None:
        """Prepare the next round. Return a reason if this round must not start, or None otherwise."""
        return None

    def ask_for_scores(self, state: State) -> None:
        """Request this state's scores together with the next training, so that `evaluate` can use them."""

    def evaluate(self, state: State) -> tuple[State, str]:
        """Return the state with its scores added to the records, and a sentence if the scores end the run."""
        return state, ""

    def trained(self, state: State) -> tuple[str, ...]:
        """Record that a round has changed the server's state. Return sentences for the run's notes."""
        return ()

    def diverges(self, state: State, sentence: str) -> None:
        """Record that a run is diverging but will continue."""

    def record_failure(self, state: State, error: GivenUp) -> None:
        """Record that a round was abandoned without changing anything."""

    def review_round(self, state: State) -> str | None:
        """Inspect a round once its scores are known. The run ends if this returns a sentence."""
        return None

    def interrupted(self) -> bool:
        """Return True if the user wants to pause the run and resume it later."""
        return False

    def extras(self, state: State) -> dict[str, Any]:
        """Return JSON-serializable values that a checkpoint stores in addition to the state."""
        return {}


def run_rounds(job: Job, clients: Clients, checkpoints: RunCheckpoints, hooks: Hooks, state: State) -> RunEnd:
    """Run the remaining rounds, and save the final state.

    If no upload was used or no loss changed, nothing was trained, and the run is reported as failed no matter how many
    rounds it took. Changes within rounding errors do not count as changes, unless the step size is so small that
    training may have caused them. In that case, a note is added. A failed round changes nothing, so the final result
    contains the state from before that round. If the run can be resumed after the failure, no checkpoint is written,
    and the run later resumes from the newest checkpoint.

    Raises:
        ClientError: the code of the method failed.
        CheckpointError: a checkpoint cannot be written.
    """
    loop = _RunLoop(job, clients, checkpoints, hooks, state)
    saves = True
    try:
        stop, detail = loop.run()
    except RunStopped as error:
        stop, detail, saves = error.reason, error.detail, not error.reason.is_resumable
        loop.state = loop.state.with_(notes=(*loop.state.notes, *error.events))
    state, diverged, precision = loop.state, None, torch.finfo(job.oracle.dtype).eps
    loop.divergence.read(state.records, ended=True)
    if stop in (Stop.DONE, Stop.STOPPED) and loop.divergence.round is not None:
        stop, diverged = Stop.DIVERGED, loop.divergence.round
        detail = "; ".join(filter(None, (loop.divergence.sentence, detail)))
    if stop in (Stop.DONE, Stop.STOPPED) and state.round and not state.trained:
        unused = f"no upload was used in {state.round} rounds, so nothing was trained"
        stop, detail = Stop.UNUSABLE, write_singular("; ".join(filter(None, (unused, detail))))
    elif stop in (Stop.DONE, Stop.STOPPED) and state.round and state.records.is_unchanged(ROUNDING_UNITS * precision):
        same = write_singular(f"after {state.round} rounds, every loss is unchanged except for rounding errors")
        small = NEGLIGIBLE_STEP_UNITS * precision <= job.setting.local.lr < precision**0.5
        if not small or state.records.is_unchanged():
            stop, detail = Stop.UNCHANGED, "; ".join(filter(None, (same, detail)))
        else:
            state = state.with_(notes=(*state.notes, same))
    if saves:
        checkpoints.save(state, stop, detail, diverged, **hooks.extras(state))
    return RunEnd(state, stop, detail, diverged)


class _RunLoop:
    """A run in progress. `state` is the state after the latest round or evaluation."""

    def __init__(self, job: Job, clients: Clients, checkpoints: RunCheckpoints, hooks: Hooks, state: State) -> None:
        self._job, self._clients, self._checkpoints, self._hooks = job, clients, checkpoints, hooks
        self.state, self.divergence, self._begun = state, Divergence(robust=hooks.robust_losses), state.round
        self.divergence.read(state.records)
        self._step = run_round if state.clock is None else advance_to_server_step

    def run(self) -> tuple[Stop, str]:
        """Run the remaining rounds. Return the reason why the run ended, and details.

        Raises:
            RunStopped: the run ends during a round or an evaluation.
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
            if self._lacks_events():
                return Stop.STOPPED, "all clients took part, so they probably have no events to learn from"
            if self.state.round > self._begun:
                stopped, interrupted, save = self._job.ranks.combine_flags(
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

    def _lacks_events(self) -> bool:
        """Return True if a survival run with all clients has not changed any loss.

        Before round 1, sites do not reveal if they have events. The server therefore recognizes this from the losses.
        """
        state, job = self.state, self._job
        if not (learns_from_events(job.oracle.task) and state.trained == state.round and len(state.cohort) == job.n):
            return False
        if state.records.is_unchanged() and not state.is_scored:
            self._evaluate()
        return self.state.records.is_unchanged()

    def _train_and_score(self) -> None:
        """Train the next round with messages that also request the scores of the previous round."""
        before = self.state
        self._hooks.ask_for_scores(before)
        try:
            state = self._trained(before)
        except RunStopped:
            self._review_round(before)
            raise
        scored, _ = self._evaluate_state(before)
        self.state = state.with_(records=scored.records)
        self._review_round(scored)

    def _trained(self, before: State) -> State:
        """Return the state after training the next round."""
        start = time.perf_counter()
        try:
            state, events = self._step(self._job, self._clients, before)
            events += self._hooks.trained(state)
        except GivenUp as error:
            state, events = _abandon_round(before, error), (f"round {before.round + 1} was abandoned: {error}",)
            self._hooks.record_failure(state, error)
        times = state.times.add_round(time.perf_counter() - start)
        return state.with_(notes=(*state.notes, *events), times=times)

    def _evaluate(self) -> None:
        """Evaluate the current state.

        Raises:
            RunStopped: the scores show that the run cannot continue.
        """
        self.state, unusable = self._evaluate_state(self.state)
        if unusable:
            raise RunStopped(Stop.DIVERGED, unusable)

    def _evaluate_state(self, state: State) -> tuple[State, str]:
        start = time.perf_counter()
        scored, unusable = self._hooks.evaluate(state)
        if sentence := self.divergence.read(scored.records):
            self._hooks.diverges(scored, sentence)
        return scored.with_(times=scored.times.add_evaluation(time.perf_counter() - start)), unusable

    def _review_round(self, state: State) -> str | None:
        """Let the hooks inspect a round, unless this round was completed before this process started."""
        return self._hooks.review_round(state) if state.round > self._begun else None

    def _save(self) -> None:
        self._checkpoints.save(self.state, **self._hooks.extras(self.state))


def _abandon_round(before: State, error: GivenUp) -> State:
    """Return the state after an abandoned round, which changes only the round number and the privacy cost."""
    return before.with_(round=before.round + 1, tally=before.tally.plus(torch.tensor(error.clients)))
