"""Laws of algorithms. Each function raises an `AssertionError` with a sentence if its law is violated.

The laws are checked on random heterogeneous quadratics and on a small network. The clients have different sizes and
different samples. Each check starts in the middle of a run, in which some clients have trained twice, some once, and
one never. ``check_algorithm(MyAlgorithm())`` checks all laws.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fedloom.algorithms import Algorithm, PresetMethod
from fedloom.choose import Weigher
from fedloom.data.dataset import default_to_cpu
from fedloom.errors import ConfigError, FedloomError
from fedloom.local.rows import map_rows, name_tensors
from fedloom.rows.layout import Layout
from fedloom.testing.declared import (
    METHOD_STAGES,
    bases,
    declarations,
    encoding,
    idle_is_finite,
    idle_is_zero,
    kept_rows,
    parts,
    runs,
    shapes,
    translation,
)
from fedloom.testing.federate import ReferenceState, mixed, play
from fedloom.testing.network import Classifier
from fedloom.testing.problems import TOY_LAYOUT
from fedloom.testing.report import describe_law_model, find_stage, law_error
from fedloom.testing.scene import (
    COHORT_HISTORY,
    SCENE_COHORT,
    TIGHT_TOLERANCE,
    Scene,
    Subject,
    agree,
    demand,
    law_problem,
)
from fedloom.testing.trees import distance, locate_difference, reload_from_checkpoint, select_download, take_rows


def row_independence(s: Subject) -> None:
    """Check that the upload and state of a client do not depend on which other clients train."""
    scene = Scene(s)
    together = s.algorithm.client(scene.down, scene.rows, scene.work())
    for k, i in enumerate(scene.ids):
        row = slice(k, k + 1)
        alone = s.algorithm.client(select_download(scene.down, row), take_rows(scene.rows, row), scene.work(ids=[i]))
        agree(take_rows(together, row), alone, f"row {k} changes if its client trains alone", TIGHT_TOLERANCE)
    rounds = [*COHORT_HISTORY, SCENE_COHORT]
    sentence = "the run changes if the clients of a cohort train one by one"
    agree(s.run(rounds)[-1], s.run(rounds, alone=True)[-1], sentence, TIGHT_TOLERANCE)


def permutation(s: Subject) -> None:
    """Check that permuting the cohort permutes the rows and does not change the server's state."""
    scene, order = Scene(s, ids=(0, 2, 3, 4)), [2, 0, 3, 1]  # neither a rotation nor its own inverse
    ids = [scene.ids[k] for k in order]

    a, state = s.algorithm, scene.state
    down = a.down(state.server, mixed(a, state.kept, ids), scene.ctx(ids))
    agree(down, select_download(scene.down, order), "a client's download depends on the order", TIGHT_TOLERANCE)
    up, rows = a.client(scene.down, scene.rows, scene.work())
    got = a.client(down, take_rows(scene.rows, order), scene.work(ids=ids))
    agree(got, take_rows((up, rows), order), "a client's upload or state depends on the order", TIGHT_TOLERANCE)
    want = a.server(state.server, scene.aggregate(up), scene.ctx())
    after = a.server(state.server, scene.aggregate(got[0]), scene.ctx(ids))
    agree(after, want, "the server's state depends on the order of the clients", TIGHT_TOLERANCE)


def arguments_unmodified(s: Subject) -> None:
    """Check that no function changes its arguments, or the rows of clients that do not participate."""
    scene = Scene(s, ids=(0, 1, 2))
    a, state = s.algorithm, scene.state
    kept = take_rows(state.kept, slice(None if a.mixes_all else 3)) if a.mixes else None  # views reveal writes
    rows = take_rows(state.rows, slice(3))
    down, work = scene.down, scene.work()

    def collect_inputs() -> Any:
        return scene.problem.tensors, tuple(state[1:]), down, rows

    first = map_rows(torch.clone, collect_inputs())
    up, new = a.client(down, rows, work)
    agree(collect_inputs(), first, "client changed an argument")  # even if a second call would write the same values
    whole = scene.aggregate(up)

    def arguments() -> Any:
        facts = (work.ids, work.weight, work.sizes, work.steps, *scene.ctx()[3:4], *scene.ctx()[5:7])
        return scene.problem.tensors, tuple(state[1:]), down, up, whole, new, facts

    before = map_rows(torch.clone, arguments())
    settings = (work.lr, work.local, work.round, work.k)
    calls: dict[str, Callable[[], Any]] = {
        "init": lambda: a.init(scene.problem.x0, scene.ctx()),
        "down": lambda: a.down(state.server, kept, scene.ctx()),
        "client": lambda: a.client(down, rows, work),
        "server": lambda: a.server(state.server, whole, scene.ctx()),
        "global_model": lambda: a.global_model(state.server),
        "personal": lambda: a.personal(down, new, work),
    }
    for what, call in calls.items():
        call()
        agree(arguments(), before, f"{what} changed an argument")
        demand((work.lr, work.local, work.round, work.k) == settings, f"{what} changed the settings of work")


def no_state(s: Subject) -> None:
    """Check that the algorithm stays the same, calls are bitwise repeatable, and no global generator is used."""
    a = s.algorithm
    dumped, other = a.model_dump(), copy.deepcopy(a)
    before = torch.random.get_rng_state()
    first, again = s.run([*COHORT_HISTORY, SCENE_COHORT])[-1], s.run([*COHORT_HISTORY, SCENE_COHORT])[-1]
    demand(torch.equal(before, torch.random.get_rng_state()), "the method used PyTorch's global random generator")
    demand(a.model_dump() == dumped and a == other, f"the method changed from {dumped} to {a.model_dump()}")
    agree(again, first, "two identical runs give different results")
    copied = replace(s, algorithm=other).run([*COHORT_HISTORY, SCENE_COHORT])[-1]
    agree(copied, first, "a copy of the method gives different results")
    agree(
        replace(s, algorithm=a.with_()).run([*COHORT_HISTORY, SCENE_COHORT])[-1],
        first,
        "a method with the same options gives different results",
    )


def dropped_is_not_sampled(s: Subject) -> None:
    """Check that a client whose upload is lost keeps its rows, and that its upload is not part of any mean."""
    scene = Scene(s)
    lost = scene.ids[1]
    options: dict[str, Any] = {"weigher": s.weigher, "dropped": [lost]}
    got = play(s.algorithm, scene.fed, scene.state, scene.ids, **options)
    for what, old, new in (("rows", scene.state.rows, got.rows), ("kept row", scene.state.kept, got.kept)):
        agree(
            take_rows(new, lost), take_rows(old, lost), f"the {what} of a client changed although its upload was lost"
        )
    fed = scene.fed._replace(oracle=scene.problem.altered(lost).oracle(noise=0.5))
    agree(
        play(s.algorithm, fed, scene.state, scene.ids, **options),
        got,
        "the result depends on the upload of a client whose upload was lost",
        TIGHT_TOLERANCE,
    )
    if not s.algorithm.mixes:
        want = play(s.algorithm, scene.fed, scene.state, [i for i in scene.ids if i != lost], weigher=s.weigher)
        agree(got, want, "a lost upload has another effect than a client that was not sampled", TIGHT_TOLERANCE)


def precision(s: Subject) -> None:
    """Check that float32 stays float32 and agrees with float64, and that torch's default dtype is never used.

    The tolerance is 1e-4. A network that amplifies rounding errors, as BatchNorm does for two nearly equal samples, may
    differ by more: by at most 300 times the effect of changing each entry of its initial model by 1e-6.
    """
    problems = (s.problem.to(dtype) for dtype in (torch.float32, torch.float64))
    single, double = (s.run([*COHORT_HISTORY, SCENE_COHORT], problem=p)[-1] for p in problems)
    floats = {name: t for name, t in name_tensors(single.parts()).items() if t.is_floating_point()}
    for name, t in floats.items():
        demand(t.dtype == torch.float32, f"{name} has the type {t.dtype} in a float32 run")
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # an int tensor times a Python float has the default dtype
        sentence = "a float64 run depends on PyTorch's default dtype"
        agree(s.run([*COHORT_HISTORY, SCENE_COHORT])[-1], double, sentence, 1e-12)
    finally:
        torch.set_default_dtype(default)
    wide = {name: t for name, t in name_tensors(double.parts()).items() if name in floats}
    narrow = {name: t.double() for name, t in floats.items()}
    tolerance = 1e-4
    if isinstance(s.problem, Classifier) and locate_difference(narrow, wide, tolerance):
        problems = (s.problem.to(torch.float64).perturbed(draw) for draw in range(5))
        nearby = [name_tensors(s.run([*COHORT_HISTORY, SCENE_COHORT], problem=p)[-1].parts()) for p in problems]
        tolerance = max(
            tolerance, *(300 * distance(tensors[name], t) for tensors in nearby for name, t in wide.items())
        )
    agree(narrow, wide, "float32 and float64 give different results", tolerance)


def resume(s: Subject) -> None:
    """Check that a run that resumes from a checkpoint ends with bitwise the same result as an uninterrupted run."""
    rounds = [*COHORT_HISTORY, SCENE_COHORT, (1, 3)]
    whole = s.run(rounds)[-1]
    half = s.run(rounds, 2)[-1]
    state = ReferenceState(half.round, *(reload_from_checkpoint(tree) for tree in half[1:]))
    other = replace(s, algorithm=s.algorithm.with_())
    agree(other.run(rounds, 2, start=state)[-1], whole, "a resumed run differs from an uninterrupted run")


METHOD_LAWS: dict[str, Callable[[Subject], None]] = {
    law.__name__: law
    for law in (
        runs, declarations, shapes, row_independence, permutation, arguments_unmodified, no_state,
        dropped_is_not_sampled, bases, parts, kept_rows, idle_is_finite, idle_is_zero, encoding, translation,
        precision, resume,
    )
}  # fmt: skip
"""All laws of algorithms, keyed by name."""


LAW_HINTS = {
    "runs": "repair this line",
    "declarations": "annotate every upload field exactly once, as Mean, Kept or Rows, and exactly one as primary. If "
    "`client` uses work.weight, set uses_shares = True, because otherwise means apply the weights again",
    "shapes": "return one row per client [m, .], or [d] at the server, in the dtype of the model",
    "row_independence": "compute every row only from the rows of its client: no sum, mean or index over dimension 0",
    "permutation": "use work.ids and ctx.ids instead of a client's position in the cohort",
    "arguments_unmodified": "clone before an in-place operation, or make a new tensor",
    "no_state": "do not store anything on self: store values for later rounds in the rows or in the server's state",
    "dropped_is_not_sampled": "in `server`, use only values of the accepted cohort: up, ctx.ids, ctx.m and ctx.part",
    "bases": "send the new minus the old value of the base. In `server`, add ctx.part times a field that accumulates",
    "parts": "in `server`, use only those coordinates of a field that belong to its part",
    "kept_rows": "set mixes = True if `down` uses the kept rows",
    "idle_is_finite": "divide by work.steps.clamp(min=1), or use where_moved(work, new, old)",
    "idle_is_zero": "use where_moved(work, new, old) for uploads and rows, so that they do not change without a step",
    "encoding": "define `encode`, which attackers use to send a forged model: it returns every upload field that "
    "depends "
    "on the model. If the primary field is not the model minus its base, also define `decode`, its inverse",
    "translation": "use only differences and means of models, not their distance from zero. If the method needs the "
    "origin, as a regularizer does, set family = 'composite' or omit this law: without=['translation']",
    "precision": "take dtypes from the arguments: torch.zeros_like(w), torch.rand(..., dtype=w.dtype)",
    "resume": "store everything that the next round needs in the rows or in the server's state",
}
"""Usual fix for each law that may be violated. The text is the end of the law's message."""


LAYOUT_HINT = "if the method refers to layers by name, pass layout=MODULE, a module that contains these layers"
"""Usual fix for errors caused by the problems in the laws."""


@default_to_cpu()
def check_law(
    law: str,
    algorithm: Algorithm | PresetMethod,
    weigher: Weigher | None = None,
    layout: Layout = TOY_LAYOUT,
    *,
    on: Classifier | None = None,
) -> None:
    """Check that a method satisfies one law.

    Args:
        law: name of a law in `METHOD_LAWS`.
        algorithm: a method, or the combination of parts of a preset.
        weigher: weigher that is used in the runs. If None, the method's own weigher is used or, if it has none, the
            clients' shares.
        layout: names and shapes of the parameters of the quadratics.
        on: network to check the law on, instead of the quadratics.

    Raises:
        AssertionError: the law is violated. The message states the law, the method and the difference.
    """
    method, own_weigher = (
        (algorithm.algorithm, algorithm.weigher) if isinstance(algorithm, PresetMethod) else (algorithm, None)
    )
    try:
        METHOD_LAWS[law](Subject(method, weigher or own_weigher, on or law_problem(layout)).derive_options())
    except Exception as error:
        stage = find_stage(error, Algorithm, METHOD_STAGES)
        cure = LAYOUT_HINT if isinstance(error, FedloomError) else LAW_HINTS[law]
        if law == runs.__name__:
            cure = (
                f"{cure}; {describe_law_model(layout if on is None else on.layout, None if on is None else on.classes)}"
            )
        raise law_error(law, method, error, stage, cure, "" if on is None else " on a network") from error


@default_to_cpu()
def check_algorithm(
    algorithm: Algorithm | PresetMethod,
    weigher: Weigher | None = None,
    without: Collection[str] = (),
    *,
    layout: Layout | nn.Module | None = None,
    shape: Sequence[int] | None = None,
) -> None:
    """Check that a method satisfies all laws, both on quadratics and on a small network.

    Args:
        algorithm: the method.
        weigher: weigher that is used in the runs. If None, clients are weighted by their shares.
        without: names of the laws that the method violates on purpose. ``translation`` is never checked for composite
            methods, because their regularizer depends on the origin.
        layout: names and shapes of the parameters, or a module, for a method that needs certain layers. If ``shape`` is
            given, the laws are also checked on the module. Otherwise, laws are checked only on
            quadratics.
        shape: shape of one sample that the module accepts. The module must have at least two outputs per sample, one
            for each class.

    Raises:
        AssertionError: a law is violated. The message names the first such law, the method, the difference and the
            usual fix. If the method's code raised an error, the message contains the function (client, server, ...),
            the error, the file and the line.
        ConfigError: the value is not a method, the module rejects samples of this shape, or ``shape`` is given without
            a module.
    """
    if not isinstance(algorithm, Algorithm | PresetMethod):
        raise ConfigError(f"algorithm must be a method such as fl.algorithms.FedAvg(), got {algorithm!r:.80}")
    module = layout if isinstance(layout, nn.Module) else None
    if shape is not None and module is None:
        raise ConfigError("`shape` describes the samples of a module. Also pass layout=MODULE")
    names = layout if isinstance(layout, Layout) else TOY_LAYOUT if module is None else Layout.create(module)
    for law in laws_of(algorithm, without):
        check_law(law, algorithm, weigher, names)
    if layout is None or shape is not None:
        network = Classifier.create() if shape is None else Classifier.create(module, shape)
        check_network(algorithm, weigher, without, network)


def check_network(
    algorithm: Algorithm | PresetMethod, weigher: Weigher | None, without: Collection[str], network: Classifier
) -> None:
    """Check that a method satisfies the laws on a network.

    ``translation`` is not checked, because the function that a network computes depends on the origin of its
    parameters.
    """
    for law in laws_of(algorithm, {*without, "translation"}):
        check_law(law, algorithm, weigher, on=network)


def laws_of(algorithm: Algorithm | PresetMethod, without: Collection[str] = ()) -> list[str]:
    """Return the names of the laws in `METHOD_LAWS` that apply to a method.

    Args:
        algorithm: a method, or the combination of parts of a preset.
        without: names of laws to omit.
    """
    method = algorithm.algorithm if isinstance(algorithm, PresetMethod) else algorithm
    left_out = {*without, *(("translation",) if method.family == "composite" else ())}
    return [law for law in METHOD_LAWS if law not in left_out]
