"""Step that computes a personal model, theta ~ prox_{f/lam}(center), by one of three solvers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.algorithms._base import Algorithm, Derived, by_rule
from fedloom.errors import Refused
from fedloom.local import Ctx, Work, descend
from fedloom.local.dual import descend_to_tolerance
from fedloom.local.inexact import inexact
from fedloom.rows.layout import Layout


class ThetaStep(Algorithm):
    """Method in which clients minimize f_i(theta) + lam/2 ||theta - center||^2.

    The solver is the run's local SGD, gradient descent until a tolerance is reached that decreases over rounds
    (``eps0``), or gradient descent until FIAELT's criterion (9) holds.
    """

    lam: Derived = by_rule(
        description="Moreau weight lambda (default: 4/(reach * rounds), where reach is lr times the steps per "
        "round; Table III uses 1)"
    )
    eps0: float | None = Field(
        None,
        gt=0,
        description="eps^0 in Eq. 18, the tolerance before the first round (None: the run's number of SGD epochs "
        "is used instead)",
    )
    shrink: float = Field(
        0.5, gt=0, lt=1, description="upsilon_i of Eq. 18, the factor by which the tolerance shrinks every round"
    )
    most: int = Field(1000, ge=1, description="maximum number of gradient steps to reach the tolerance")
    solver: Literal["sgd", "criterion"] = Field(
        "sgd",
        description="solver for the theta step: the run's local SGD, or gradient descent until FIAELT's "
        "criterion (9) is met",
    )
    r: float = Field(
        0.005,
        gt=0,
        lt=1,
        description="tolerance r_i in FIAELT's criterion (9): the factor by which ||theta - theta*||^2 must decrease",
    )
    iterations: int = Field(100, ge=1, description="maximum number of gradient steps to meet FIAELT's criterion (9)")
    smooth: float | None = Field(
        None,
        gt=0,
        description="L in FIAELT's criterion (9), the smoothness constant of every f_i; must be less than lam "
        "(None: lam/5)",
    )

    needs: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("shrink", "most"), "eps0"),
        **dict.fromkeys(("r", "iterations", "smooth"), "solver criterion"),
    }

    @model_validator(mode="after")
    def _one_solver(self) -> Self:
        if self.solver == "criterion" and self.eps0 is not None:
            raise ValueError("solver = 'criterion' and eps0 are two different ways to end the theta step. Omit `eps0`")
        return self

    def check(self, layout: Layout, ctx: Ctx) -> list[str]:
        if self.solver == "criterion" and self.smooth and self.lam <= self.smooth:
            raise Refused(
                f"{type(self).__name__} with solver 'criterion' needs lam > smooth, got lam = {self.lam:g} and smooth "
                f"= {self.smooth:g}, so the bound (9) does not hold. Set a larger lam"
            )
        return []

    @property
    def full_gradients(self) -> str:
        name = type(self).__name__
        return f"{name} with solver 'criterion'" if self.solver != "sgd" else f"{name} with eps0" if self.eps0 else ""

    @property
    def ignored(self) -> tuple[str, ...]:
        return ("batch_size", "epochs", "steps") if (self.eps0 or self.solver != "sgd") and self.lam else ()

    def theta_step(self, theta: Tensor, centre: Tensor, eps: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        """Compute theta ``[m, d]``, starting from its current value.

        Args:
            theta: current personal models ``[m, d]``.
            centre: centers ``[m, d]`` toward which the personal models are pulled.
            eps: tolerances ``[m, 1]`` of the personal models.
            work: the clients' local problems.

        Returns:
            New personal models ``[m, d]``, and the tolerances ``[m, 1]`` that they satisfy.
        """
        if self.solver == "criterion":
            pull, zero = (self.lam, centre), torch.zeros_like(theta)
            solution = inexact(theta, work, pull, zero, "gd", self.smooth or self.lam / 5, self.r, self.iterations)
            return solution.w, eps
        if self.eps0 is None:
            return descend(theta, work, pull=((self.lam, centre),)), eps
        eps = self.shrink * eps  # Eq. 18
        return descend_to_tolerance(theta, centre, eps, work, self.lam, self.most), eps
