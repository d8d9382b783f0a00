"""Laws of a method's functions: they run, their fields match the declarations, and they use only what is allowed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.algorithms import Algorithm, primary_field, upload_fields
from fedloom.algorithms._messages import base_of, replace_model
from fedloom.local.rows import map_rows, name_tensors
from fedloom.seeds import generator
from fedloom.testing.federate import ReferenceFederation, ReferenceState, begin, mixed, personal_models
from fedloom.testing.problems import Problem
from fedloom.testing.report import find_stage
from fedloom.testing.scene import (
    COHORT_HISTORY,
    LOCAL_SETTINGS,
    SCENE_COHORT,
    TIGHT_TOLERANCE,
    Scene,
    Subject,
    agree,
    demand,
)
from fedloom.testing.trees import locate_difference, plus, take_rows

METHOD_STAGES = frozenset(name for name in vars(Algorithm) if not name.startswith("_"))
"""Functions of a method. An error in them is reported as an error in the method instead of a violated law."""


def runs(s: Subject) -> None:
    """Check that every function of the method runs, with clients that have trained before and clients that have not."""
    try:
        state = s.run([*COHORT_HISTORY, SCENE_COHORT])[-1]
        personal_models(s.algorithm, Scene(s).fed, state)
        s.algorithm.global_model(state.server)
    except Exception as error:
        if find_stage(error, Algorithm, METHOD_STAGES) is not None:  # other laws report invalid results
            raise


def declarations(s: Subject) -> None:
    """Check that one field contains the model, that bases and parts exist, and that declared fields are stored.

    Only a method with ``uses_shares`` may use the clients' weights, because all means already apply them.
    """
    problem, fields = s.problem, upload_fields(type(s.algorithm))
    primary = [name for name, kind in fields.items() if kind.primary]
    demand(len(primary) == (1 if fields else 0), f"exactly one upload field must be primary, got {primary}")
    kept = [name for name, kind in fields.items() if kind.keeps]
    template = s.algorithm.init(
        problem.x0, ReferenceFederation(problem.oracle(), problem.alpha, LOCAL_SETTINGS).ctx(0, SCENE_COHORT)
    )[2]
    demand(
        [*name_tensors(template)] == kept,
        f"init must return a template with the kept fields {kept}, got {[*name_tensors(template)]}",
    )
    demand(not kept or primary[0] not in kept or kept == [*fields], "if the primary field is Kept, all must be Kept")
    demand(kept or not s.algorithm.mixes, "mixes is True, but no upload field is Kept")
    scene = Scene(s)
    for name, kind in fields.items():
        demand(not (kind.accumulates and kind.single), f"{name} accumulates, so it must be Mean")
        source, _, base = kind.base.partition(".")
        owner = {"zero": (), "down": scene.down._fields, "rows": scene.rows._fields}.get(source)
        demand(owner is not None and (not base or base in owner), f"{name} has the unknown base {kind.base!r}")
        if kind.part is not None:
            mask = s.algorithm.part(kind.part, problem.layout)
            fits = mask.dtype == torch.bool and mask.shape == (problem.d,)
            demand(fits, f"part must return a bool mask [d] for {kind.part!r}")
    if not (s.algorithm.uses_shares or any(getattr(kind, "weight", None) for kind in fields.values())):
        other = scene.fed._replace(weight=2 * scene.fed.weight.flip(0)).work(len(COHORT_HISTORY) + 1, scene.ids)
        agree(
            s.algorithm.client(scene.down, scene.rows, other),
            s.algorithm.client(scene.down, scene.rows, scene.work()),
            "uses_shares is False, but work.weight changes the upload",
            TIGHT_TOLERANCE,
        )


def shapes(s: Subject) -> None:
    """Check that fields are finite, have the model's dtype, and have the shape [d], [m, .] or one row per client."""
    scene = Scene(s)
    a, m, d = s.algorithm, len(scene.ids), scene.problem.d
    up, rows = a.client(scene.down, scene.rows, scene.work())
    demand(list(up._fields) == [*upload_fields(type(a))], "the upload does not have the declared fields")
    server = a.server(scene.state.server, scene.aggregate(up), scene.ctx())
    for what, tree in (("server", server), ("download", scene.down), ("upload", up), ("client", rows)):
        for name, t in name_tensors(tree).items():
            demand(not t.is_floating_point() or t.dtype == torch.float64, f"{what} {name} has dtype {t.dtype}")
            demand(t.isfinite().all(), f"{what} {name} is not finite")
            per_client = what in ("upload", "client") or (what == "download" and t.dim() == 2)
            demand(
                t.shape == (m, t.shape[-1]) if per_client else t.dim() >= 1, f"{what} {name} has shape {list(t.shape)}"
            )
    agree(
        map_rows(torch.zeros_like, rows),
        map_rows(torch.zeros_like, scene.rows),
        "the shapes of the client's rows changed",
    )
    agree(
        map_rows(torch.zeros_like, server),
        map_rows(torch.zeros_like, scene.state.server),
        "the shapes of the server's state changed",
    )
    if up._fields and upload_fields(type(a))[primary_field(type(a))].carries == "model":
        width = getattr(up, primary_field(type(a))).shape[-1]
        demand(scene.down[0].shape[-1] == width, "the first field of the download must contain the model")
    x = a.global_model(server)
    fits = x is None or (x.shape == (d,) and x.dtype == torch.float64)
    demand(fits, "global_model must return [d] in the model's dtype")
    v = personal_models(a, scene.fed, scene.state)
    demand(
        v is None or (v.shape == (scene.fed.n, d) and v.isfinite().all()),
        "personal must return finite models of shape [m, d]",
    )
    demand(x is not None or v is not None, "a method must have a global model, personal models or both")
    template = begin(a, scene.fed, scene.problem.x0 if x is None else x).rows
    new = a.personal(scene.down, a.client(scene.down, take_rows(template, slice(m)), scene.work())[1], scene.work())
    demand((new is None) == (v is None), "personal must treat a new client like all other clients")
    demand(new is None or new.shape == (m, d), "the personal model of a new client must have the shape [d]")


def bases(s: Subject) -> None:
    """Check that a field sent as a difference is the new value minus the old value of its base.

    If all clients of a cohort send the same model, the server must not move away from this model. If fields other than
    the model accumulate, their sum must be the mean over all clients, weighted by shares.
    """
    scene = Scene(s)
    a, fields = s.algorithm, upload_fields(type(s.algorithm))
    up, rows = a.client(scene.down, scene.rows, scene.work())
    states = s.run([*COHORT_HISTORY, SCENE_COHORT], dropped=[(), (1,), (4,)])
    for name, kind in fields.items():
        source, _, field = kind.base.partition(".")
        if source == "rows":
            change = getattr(rows, field) - base_of(kind, scene.down, scene.rows)
            mask = 1.0 if kind.part is None else a.part(kind.part, scene.problem.layout)
            sentence = f"{name} is not the change of {kind.base}"
            agree(getattr(up, name) * mask, change * mask, sentence, TIGHT_TOLERANCE)
        if source == "rows" and kind.accumulates and not kind.primary:
            want = (scene.fed.weight * (getattr(states[-1].rows, field) - getattr(states[0].rows, field))).sum(0)
            changes = [t - name_tensors(states[0].server)[n] for n, t in name_tensors(states[-1].server).items()]
            demand(
                any(locate_difference(t, want, TIGHT_TOLERANCE) is None for t in changes),
                f"{name} accumulates, but no field of the server's state is the weighted mean of {kind.base} over all "
                f"clients. Add {name} times ctx.part",
            )
        if source == "down" and kind.primary:
            _check_direction(scene, name, field)
    sums = [name for name, kind in fields.items() if kind.accumulates]
    if sums and not any(fields[name].primary for name in sums):
        whole, ctx = scene.aggregate(up), scene.ctx()
        doubled = whole._replace(**{name: 2 * getattr(whole, name) for name in sums})
        weight = ctx.weight * (1 - ctx.part / 2) / (1 - ctx.part)
        weight[ctx.ids] = ctx.weight[ctx.ids] / 2
        got = a.server(scene.state.server, doubled, ctx._replace(weight=weight))
        want = a.server(scene.state.server, whole, ctx)
        sentence = f"the server does not multiply {sums} by the cohort's share of all clients"
        agree(got, want, sentence, TIGHT_TOLERANCE)


def parts(s: Subject) -> None:
    """Check that the server does not use coordinates outside a field's part, because these coordinates are not sent."""
    scene = Scene(s)
    up = scene.aggregate(s.algorithm.client(scene.down, scene.rows, scene.work())[0])
    want = s.algorithm.server(scene.state.server, up, scene.ctx())
    for name, kind in upload_fields(type(s.algorithm)).items():
        if kind.part is not None:
            inside = s.algorithm.part(kind.part, scene.problem.layout)
            noisy = up._replace(**{name: torch.where(inside, getattr(up, name), getattr(up, name) + 1)})
            got = s.algorithm.server(scene.state.server, noisy, scene.ctx())
            agree(got, want, f"the server uses coordinates of {name} outside part {kind.part!r}")


def kept_rows(s: Subject) -> None:
    """Check that only a method with ``mixes`` uses the rows that the server stores for the cohort."""
    scene = Scene(s)
    if not s.algorithm.mixes:
        garbage = map_rows(lambda t: torch.full_like(t, torch.nan), scene.state.kept)
        got = s.algorithm.down(scene.state.server, garbage, scene.ctx())
        agree(got, scene.down, "down uses the kept rows, although mixes is False")


def idle_is_finite(s: Subject) -> None:
    """Check that a client that takes no step returns finite values."""
    scene = Scene(s)
    for name, t in name_tensors(s.algorithm.client(scene.down, scene.rows, scene.work(0))).items():
        demand(t.isfinite().all(), f"{name} is not finite if a client takes no step")


def idle_is_zero(s: Subject) -> None:
    """Check that the differences sent by a client that takes no step are zero."""
    scene = Scene(s)
    up, _ = s.algorithm.client(scene.down, scene.rows, scene.work(0))
    for name, kind in upload_fields(type(s.algorithm)).items():
        if kind.base != "zero":
            sentence = f"{name} is not zero if a client takes no step"
            agree(getattr(up, name), torch.zeros_like(getattr(up, name)), sentence, TIGHT_TOLERANCE)


def encoding(s: Subject) -> None:
    """Check that `Algorithm.encode` inverts `Algorithm.decode`: it returns the upload that contains the model."""
    scene = Scene(s)
    a, fields = s.algorithm, upload_fields(type(s.algorithm))
    if not fields:
        return
    up, _ = a.client(scene.down, scene.rows, scene.work())
    model = a.decode(scene.down, scene.rows, up, scene.work())
    width = getattr(up, primary_field(type(a))).shape[-1]
    demand(model.shape == (len(scene.ids), width), f"decode must return models [m, {width}], got {list(model.shape)}")
    message = _encode(scene, model)
    for name, kind in fields.items():
        mask = 1.0 if kind.part is None else a.part(kind.part, scene.problem.layout)
        agree(
            getattr(message, name) * mask,
            getattr(up, name) * mask,
            f"{name} changes if its model is decoded and encoded again",
            TIGHT_TOLERANCE,
        )


def translation(s: Subject) -> None:
    """Check that models and absolute messages move together with the origin of the parameter space.

    Differences, duals and control variates must not change.
    """
    scene = Scene(s)
    assert isinstance(scene.problem, Problem)
    a, t = s.algorithm, torch.linspace(-2, 3, scene.problem.d, dtype=torch.float64)
    translated = scene.problem.shift(t)
    fed = scene.fed._replace(oracle=translated.oracle(noise=0.5))
    here, moved = begin(a, scene.fed, scene.problem.x0), begin(a, fed, translated.x0)
    ids = list(scene.ids)

    def shift(new: object, old: object) -> dict[str, Tensor]:
        return {n: v - name_tensors(old)[n] for n, v in name_tensors(new).items() if v.is_floating_point()}

    def first_down(state: ReferenceState, f: ReferenceFederation) -> Any:
        return a.down(state.server, mixed(a, state.kept, ids), f.ctx(1, ids))

    by = {
        "down": shift(first_down(moved, fed), first_down(here, scene.fed)),
        "rows": shift(take_rows(moved.rows, ids), take_rows(here.rows, ids)),
        "kept": shift(take_rows(moved.kept, ids), take_rows(here.kept, ids)),
        "server": shift(moved.server, here.server),
    }
    work = fed.work(len(COHORT_HISTORY) + 1, ids)
    up, rows = a.client(plus(scene.down, by["down"]), plus(scene.rows, by["rows"]), work)
    up0, rows0 = a.client(scene.down, scene.rows, scene.work())
    agree(rows, plus(rows0, by["rows"]), "the client's state depends on the origin", TIGHT_TOLERANCE)
    moves: dict[str, Tensor] = {}
    for name, kind in upload_fields(type(a)).items():
        value = getattr(up0, name)
        if kind.base != "zero" or not (kind.keeps or kind.primary):
            moves[name] = torch.zeros_like(value)
        else:
            moves[name] = by["kept"][name] if kind.keeps else t.expand_as(value)
    agree(up, plus(up0, moves), "the upload depends on the origin", TIGHT_TOLERANCE)
    got = a.server(plus(scene.state.server, by["server"]), scene.aggregate(up), scene.ctx())
    want = plus(a.server(scene.state.server, scene.aggregate(up0), scene.ctx()), by["server"])
    agree(got, want, "the server's state depends on the origin", TIGHT_TOLERANCE)


def _encode(scene: Scene, model: Tensor) -> Any:
    """Return the uploads that contain the given models ``[m, d]``, as an attack creates them."""
    a = scene.subject.algorithm
    message = a.encode(model, scene.down, scene.rows, scene.work())
    if message is None:
        idle = a.client(scene.down, scene.rows, scene.work(0))
        message = replace_model(type(a), idle, model, scene.down, scene.rows)
    return message[0]


def _check_direction(scene: Scene, name: str, field: str) -> None:
    """Check that the received model does not move away from a model that all clients send."""
    a, old = scene.subject.algorithm, getattr(scene.down, field)
    kind = upload_fields(type(a))[name]
    mask = 1.0 if kind.part is None else a.part(kind.part, scene.problem.layout)
    step = torch.randn(old.shape[-1], generator=generator(0, purpose="direction"), dtype=torch.float64) * mask
    up = _encode(scene, (old + step).expand(len(scene.ids), -1))
    server = a.server(scene.state.server, scene.aggregate(up), scene.ctx())
    new = getattr(a.down(server, scene.kept, scene.ctx()), field)
    away = f"all clients sent the model {field} + s, and the server moved {field} in the direction of -s"
    demand(((new - old) * step).sum() >= 0, f"{away}, so {name} is not the new value minus the old one")
