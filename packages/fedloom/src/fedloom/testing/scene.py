"""Scene for checking laws: the middle of a short run of one method."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fedloom.algorithms import Algorithm, upload_fields
from fedloom.choose import Weigher
from fedloom.local import Ctx, LocalSGD, Work
from fedloom.rows.layout import Layout
from fedloom.testing.federate import ReferenceFederation, ReferenceState, federate, mixed
from fedloom.testing.network import Classifier
from fedloom.testing.problems import TOY_LAYOUT, Problem
from fedloom.testing.trees import locate_difference, take_rows

LOCAL_SETTINGS = LocalSGD(lr=0.1, batch_size=2, epochs=1)
COHORT_HISTORY = ((0, 1, 2), (1, 2, 3))
SCENE_COHORT = (0, 2, 4)
TIGHT_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Subject:
    """Input of a law: a method, its weigher if there is one, and local problems."""

    algorithm: Algorithm
    weigher: Weigher | None
    problem: Problem | Classifier

    def derive_options(self) -> Subject:
        """Return the same input with the method's derived options set for its problem."""
        problem = self.problem
        fed = ReferenceFederation(problem.oracle(), problem.alpha, LOCAL_SETTINGS)
        return replace(self, algorithm=self.algorithm.derive_options(fed.ctx(0, range(fed.n))))

    def run(
        self, cohorts: Sequence[Collection[int]], rounds: int | None = None, **options: Any
    ) -> list[ReferenceState]:
        """Run a few rounds with the given cohorts.

        Unless a different problem is given, the input's own problem is used.
        """
        choices = {"problem": self.problem, "local": LOCAL_SETTINGS, "noise": 0.5, "weigher": self.weigher, **options}
        return federate(self.algorithm, rounds=len(cohorts) if rounds is None else rounds, cohorts=cohorts, **choices)


class Scene:
    """Point in the middle of a run, with the state, the download and the local problems of a cohort.

    Args:
        subject: the method.
        ids: the cohort.
    """

    def __init__(self, subject: Subject, ids: Sequence[int] = SCENE_COHORT) -> None:
        self.subject, self.a, self.ids, self.problem = subject, subject.algorithm, list(ids), subject.problem
        self.fed = ReferenceFederation(self.problem.oracle(noise=0.5), self.problem.alpha, LOCAL_SETTINGS)
        self.state = subject.run(COHORT_HISTORY)[-1]
        self.kept = mixed(self.a, self.state.kept, self.ids)
        self.rows = take_rows(self.state.rows, self.ids)
        self.down = self.a.down(self.state.server, self.kept, self.ctx())

    def ctx(self, ids: Sequence[int] | None = None) -> Ctx:
        """Return the context that the server receives."""
        return self.fed.ctx(len(COHORT_HISTORY) + 1, self.ids if ids is None else ids)

    def work(self, steps: int | None = None, ids: Sequence[int] | None = None) -> Work:
        """Return the local problems of the cohort."""
        return self.fed.work(len(COHORT_HISTORY) + 1, self.ids if ids is None else ids, steps)

    def aggregate(self, up: Any) -> Any:
        """Return an upload as the server receives it, as unweighted means or as rows."""
        fields = upload_fields(type(self.a))
        means = (fields[name].averaged for name in up._fields)
        return type(up)(*(value.mean(0) if mean else value for mean, value in zip(means, up, strict=True)))


@cache
def law_problem(layout: Layout = TOY_LAYOUT) -> Problem:
    """Return the quadratics for checking laws: five clients of different sizes, weighted by sample count."""
    return Problem.random(7, layout=layout, weights="samples")


def demand(holds: object, sentence: str) -> None:
    """Raise an `AssertionError` with the given sentence if a condition does not hold."""
    if not holds:
        raise AssertionError(sentence)


def _parts(tree: object) -> Any:
    return tree.parts() if isinstance(tree, ReferenceState) else tree


def agree(got: object, want: object, sentence: str, tol: float = 0.0) -> None:
    """Raise an error if two states differ. The message states the difference."""
    phrase = locate_difference(_parts(got), _parts(want), tol)
    demand(phrase is None, f"{sentence}: {phrase}")
