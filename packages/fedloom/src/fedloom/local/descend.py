"""descend: local SGD (or another optimizer) whose direction is given as data, so oracles can fuse the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedloom.errors import CodeError, Refused
from fedloom.local.iterate import iterate
from fedloom.local.optimizer import decays_itself
from fedloom.local.rows import each_client, per_client, per_coordinate
from fedloom.local.steppers import Steppers
from fedloom.local.terms import Bound, active, bound
from fedloom.rows.masks import spans

if TYPE_CHECKING:
    from fedloom.local.batches import Batch
    from fedloom.local.terms import Term
    from fedloom.local.work import Work
    from fedloom.rows.proxes import Prox
    from fedloom.seeds import Purpose

Pull = tuple[float | Tensor, Tensor]
"""Pair (mu, x) for a proximal term mu/2 ||w - x||^2, where x is ``[d]`` or ``[m, d]``.

The strength mu is a scalar or ``[m, 1]``. If mu is ``[d]`` or ``[m, d]``, the term is the sum of mu_j/2 (w_j - x_j)^2
over coordinates j.
"""

ALL_ROWS = [slice(None)]


class _DescentRows(NamedTuple):
    w: Tensor
    velocity: Tensor | None
    pulled: Tensor | None
    steady: Tensor | None
    mask: Tensor | None
    rest: Tensor | None
    centre: Tensor | None
    scale: Tensor | None
    terms: tuple[Bound, ...]
    decay: Tensor | None


def descend(
    w: Tensor,
    work: Work,
    pull: Sequence[Pull] = (),
    shift: Tensor | None = None,
    prox: tuple[Prox, Tensor | None] | None = None,
    mask: Tensor | None = None,
    steps: Tensor | int | None = None,
    stream: Purpose = "local",
    lr: float | None = None,
    scale: Tensor | None = None,
    decay: float = 1.0,
    terms: Sequence[Term] = (),
) -> Tensor:
    """Minimize s f_i(w) + sum mu/2 ||w - x||^2 + <shift, w> + terms by local SGD that starts at ``w``.

    A step is ``w <- w - lr (s g(w) + sum mu (w - x) + shift)``, where g is the gradient on a batch, with the momentum,
    decay and clipping of `LocalSGD`. If a prox is given, the step ``w <- centre + prox_{lr f}(w - centre)`` follows.
    The other optimizers in `LocalSGD` use the same direction but do not support a prox.

    Args:
        w: starting point of each client, ``[d]`` or ``[m, d]``. Not modified.
        work: the clients' local problems.
        pull: proximal terms (mu, x), where mu is a scalar, ``[m, 1]``, or ``[d]`` or ``[m, d]`` for a separate strength
            per coordinate.
        shift: vector ``[d]`` or ``[m, d]`` that is added to the gradient.
        prox: pair (f, centre) of the function and the point around which it is applied. None is the origin.
        mask: mask ``[d]`` or ``[m, d]`` of bool or of zeros and ones, marking the coordinates that may change.
        steps: number of steps, ``[m, 1]`` or a scalar. If None, the round's number of steps.
        stream: name of the stream of batches. Calls with the same stream use the same batches.
        lr: step size. If None, the round's step size is used.
        scale: factor s > 0 of the local loss, ``[m, 1]``. None stands for 1.
        decay: factor in (0, 1] by which the step size is multiplied after each step.
        terms: functions of the representation that are added to the loss. Their gradient is added to the batch gradient
            before clipping.

    Returns:
        ``[m, d]``. A problem with an exact solution (`Quadratic` with ``solve=True``) is solved exactly instead.

    Raises:
        CodeError: ``pull`` does not consist of pairs, or a strength has the wrong shape.
        ConfigError: a prox is given with an optimizer other than plain SGD, or the model or the exact solution does not
            support the terms.
    """
    m, local = work.m, work.local
    pairs: Sequence[object] = pull  # may come from user code
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise CodeError("descend: `pull` must contain pairs of a strength and a point, as in pull=((mu, x),)")
    rate = work.lr if lr is None else lr
    w = each_client(w, m)
    pull = [(per_coordinate(mu, m, w) if isinstance(mu, Tensor) else mu, x) for mu, x in pull]
    pulled: float | Tensor = sum((mu for mu, _ in pull), 0.0)
    plain, terms = local.optimizer == "sgd", active(terms)
    handed = not plain and work.oracle.minimise is None and decays_itself(local)
    reached = None
    if local.weight_decay or not plain:
        reached = work.oracle.reached_with_terms if terms else work.oracle.reached
    shrinks: Tensor | None = None
    if local.weight_decay and not handed:
        shrinking = local.weight_decay * (1.0 if scale is None else scale)
        if reached is None:
            pulled = pulled + shrinking
        else:
            shrinks = per_client(shrinking, m, w) * reached
    if isinstance(pulled, Tensor):
        pulled = per_coordinate(pulled, m, w)
    if work.oracle.minimise is not None and terms:
        raise Refused("a problem that is solved exactly cannot have additional terms. Use local steps instead")
    if work.oracle.minimise is not None and prox is None:
        steady = _constant_step_part(1.0, pull, shift, w)
        best = _exact_minimum(work, w, pulled, steady, None if mask is None else mask > 0, scale)
        return torch.where(per_client(work.steps if steps is None else steps, m, w) > 0, best, w)
    if prox is not None and not plain:
        raise Refused(f"a prox after every local step requires plain sgd, but the optimizer is {local.optimizer!r}")
    moving = spans(mask) if mask is not None and mask.dim() == 1 and plain else ALL_ROWS
    mask = None if mask is None or moving != ALL_ROWS else each_client(mask.to(w), m)
    rest = None if mask is None else torch.addcmul(w, w, mask, value=-1.0)
    whole = plain and local.clip is None and moving == ALL_ROWS and decay == 1 and not terms and shrinks is None
    whole = whole and not (isinstance(pulled, Tensor) and pulled.shape[1] > 1)
    in_place = whole and not local.momentum
    steady = _constant_step_part(-rate if in_place else 1.0, pull, shift, w)
    rows = _DescentRows(
        w.clone(memory_format=torch.contiguous_format),
        torch.zeros_like(w, memory_format=torch.contiguous_format) if local.momentum else None,
        pulled if isinstance(pulled, Tensor) else None,
        None if steady is None else each_client(steady, m),
        mask,
        rest if rest is not None and bool(rest.any()) else None,
        None if prox is None or prox[1] is None else each_client(prox[1], m),
        scale,
        bound(terms, w),
        shrinks,
    )

    if whole and mask is None and prox is None:
        one = (1 - rate * pulled, -rate) if in_place else (local.momentum, 1.0)
        if work.descend_(rows.w, steps, stream, (*one, rows.steady, scale, None if in_place else (pulled, rate))):
            return rows.w
    functions = [term.fn for term in terms]
    steppers = None if plain else Steppers(rows.w, work, stream, rate)

    def step(rows: _DescentRows, work: Work, batch: Batch) -> _DescentRows:
        w, factor = rows.w, pulled if rows.pulled is None else rows.pulled
        if steppers is not None:
            g = direction(rows, work, batch, factor)
            left = None if reached is None else _SavedParameters.create(w, g, reached)
            steppers.step_(w, g if rows.mask is None else g.mul_(rows.mask), work.slots)
            if left is not None:
                left.put_back_(w)
        elif in_place:
            work.addgrad_(w, w, _scale_batch(batch, rows), 1 - rate * factor, -rate, rows.steady)
        else:
            g = direction(rows, work, batch, factor)
            for part in moving:
                w[:, part].sub_(g[:, part], alpha=rate * decay**work.k)
        _restore_masked_(rows)
        if prox is not None:
            centre = 0.0 if rows.centre is None else rows.centre
            to = prox[0].prox(w - centre, rate * decay**work.k, work.layout) + centre
            for part in moving:
                w[:, part] = to[:, part]
            _restore_masked_(rows)
        return rows

    def direction(rows: _DescentRows, work: Work, batch: Batch, factor: float | Tensor) -> Tensor:
        g = torch.empty_like(rows.w) if rows.velocity is None else rows.velocity
        if local.clip is None:
            scaled, terms = _scale_batch(batch, rows), _unscale_terms(rows)
            work.addgrad_(g, rows.w, scaled, local.momentum, 1.0, rows.steady, functions, terms)
        else:
            clipped = work.clipped(rows.w, batch, functions, rows.terms)
            clipped = clipped if rows.scale is None else clipped.mul_(rows.scale)
            g = clipped if rows.velocity is None else g.mul_(local.momentum).add_(clipped)
            g = g if rows.steady is None else g.add_(rows.steady)
        if rows.decay is not None:
            g.addcmul_(rows.w, rows.decay)
        if isinstance(factor, Tensor):
            return g.addcmul_(rows.w, factor)
        return g.add_(rows.w, alpha=factor) if factor else g

    trained = iterate(step, rows, work, steps, stream=stream).w
    if steppers is not None:
        steppers.keep()
    return trained


class _SavedParameters(NamedTuple):
    """Parameters without a gradient. Their values are saved before an optimizer step that may change them.

    PyTorch optimizers skip parameters without a gradient. In a row of all parameters, such a parameter has a gradient
    of 0 instead.
    """

    skipped: Tensor
    before: Tensor

    @classmethod
    def create(cls, w: Tensor, g: Tensor, reached: Tensor) -> _SavedParameters:
        """Save the parameters without a gradient, given the rows ``w [m, d]`` and the directions ``g [m, d]``."""
        skipped = (reached == 0) & (g == 0)
        return cls(skipped, w[skipped])

    def put_back_(self, w: Tensor) -> None:
        """Restore the saved values in ``w``."""
        w[self.skipped] = self.before


def _restore_masked_(rows: _DescentRows) -> None:
    """Restore the coordinates outside the mask, which must not change."""
    if rows.mask is not None:
        rows.w.mul_(rows.mask)
        if rows.rest is not None:
            rows.w.add_(rows.rest)


def _scale_batch(batch: Batch, rows: _DescentRows) -> Batch:
    return batch if rows.scale is None else batch.scaled(rows.scale)


def _unscale_terms(rows: _DescentRows) -> Sequence[Bound]:
    """Return the terms with weights that cancel the scaling of the batch."""
    scale = rows.scale
    return rows.terms if scale is None else [t._replace(weight=t.weight / scale) for t in rows.terms]


def _constant_step_part(factor: float, pull: Sequence[Pull], shift: Tensor | None, w: Tensor) -> Tensor | None:
    """Return the constant part of a step, ``factor (shift - sum mu x)``. It is ``[d]`` if all clients share it."""
    total: Tensor | None = None
    for mu, x in pull:
        if not isinstance(mu, Tensor) and mu == 0:
            continue
        total = (-factor * mu) * x if total is None else total - (factor * mu) * x
    if shift is None:
        return total
    return factor * shift if total is None else torch.add(total, shift, alpha=factor)


def _exact_minimum(
    work: Work, w: Tensor, mu: float | Tensor, steady: Tensor | None, mask: Tensor | None, scale: Tensor | None
) -> Tensor:
    """Return argmin s f_i(w) + mu/2 ||w||^2 + <steady, w> for a problem with an exact solution."""
    assert work.oracle.minimise is not None
    s = per_client(1.0 if scale is None else scale, work.m, w)
    rest = None if steady is None else each_client(steady, work.m) / s
    return work.oracle.minimise(w, work.ids, per_coordinate(mu, work.m, w) / s, rest, mask)
