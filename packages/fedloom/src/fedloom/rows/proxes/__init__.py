"""Functions with a proximal operator: `f.f(x)` and `f.prox(v, t)`. ``PROXES`` lists the functions by kind."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from fedloom.rows.proxes._base import Form, Prox, find_form
from fedloom.rows.proxes.nonconvex import MCP, SCAD
from fedloom.rows.proxes.norms import L1, L2, ElasticNet, GroupL1, Linf, SquaredL2
from fedloom.rows.proxes.sets import Affine, Box, HalfSpace, L1Ball, L2Ball, LinfBall, Simplex
from fedloom.rows.proxes.spectral import Nuclear, NuclearBall
from fedloom.rows.proxes.total import PROX_PARTS, Total, table_validator
from fedloom.values import Value

PROXES: dict[str, type[Value]] = {**PROX_PARTS, "total": Total}
"""Functions with a proximal operator, keyed by kind."""

AnyProx = Annotated[SerializeAsAny[Value], BeforeValidator(table_validator(PROXES))]
"""Type of a field that holds a function with a proximal operator, given as a value or as a table {kind, ...fields}."""

__all__ = [
    "L1", "L2", "MCP", "PROXES", "SCAD", "Affine", "AnyProx", "Box", "ElasticNet", "Form", "GroupL1", "HalfSpace",
    "L1Ball", "L2Ball", "Linf", "LinfBall", "Nuclear", "NuclearBall", "Prox", "Simplex", "SquaredL2", "Total",
    "find_form",
]  # fmt: skip
