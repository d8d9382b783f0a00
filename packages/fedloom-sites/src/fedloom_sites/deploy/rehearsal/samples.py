"""Attacks on samples: a dishonest server crafts models so that answers or rejections reveal a site's samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.data import Federation
from fedloom.engine.clients.scores import pass_shared
from fedloom.engine.job import Job
from fedloom_sites.deploy.noise import deployed_setting, get_site_noise
from fedloom_sites.deploy.protocol.lengths import is_absolute_model
from fedloom_sites.deploy.rehearsal.copies import RehearsedSite
from fedloom_sites.deploy.rehearsal.outcomes import AttackOutcome, InapplicableAttack, judge_attack
from fedloom_sites.deploy.rehearsal.rogue import RogueServer
from fedloom_sites.deploy.rehearsal.sums import play_session
from fedloom_sites.deploy.secure.protocol import SIGNATURE_BYTES
from fedloom_sites.deploy.secure.vectors import UploadVector

QUESTION_COUNT, QUESTION_SECONDS = 24, 90.0
"""Maximum number of crafted models to try, and time limit in seconds."""
BUDGET_SETTINGS: dict[str, Any] = {"models_per_round": 10**6, "models_in_run": 10**6}
"""Settings without a budget, for attacks that need more answers than an agreement allows."""
READ_ERROR = 0.01
"""A sample counts as read up to this relative error."""
MAX_COMPARED_SAMPLES = 2000
"""Number of samples that are compared with the candidates."""
MEMORIZED_AUROC = 0.75
"""A model memorizes if the AUROC of guessing its training samples is at least this high. 0.5 is chance."""
MAX_REPLACEMENT_SAMPLES = 8
"""Maximum number of samples that are tried in place of the first sample."""
UNIT_SCALE = 1e-3
"""Scale of crafted weights: so small that the loss is nearly the same for all samples."""


class FirstLayer(NamedTuple):
    """First linear layer of a model, with the layer after it.

    Attributes:
        weight, bias, following: names of parameters.
        units: number of units of the layer.
    """

    weight: str
    bias: str
    following: str
    units: int


def find_first_layer(job: Job, features: int) -> FirstLayer:
    """Return the first layer of a model that begins with a linear layer.

    Raises:
        InapplicableAttack: the model does not begin with a linear layer, or consists of a single layer.
    """
    layout = job.oracle.layout
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    names = [*shapes]
    first = shapes[names[0]]
    units = int(first[0])
    after = [name for name in names[1:] if len(shapes[name]) == 2 and int(shapes[name][1]) == units]
    biases = [name for name in names[1:3] if tuple(shapes[name]) == (units,)]
    if len(first) != 2 or int(first[1]) != features or not after or not biases:
        raise InapplicableAttack(
            "the model's first layer is not a hidden linear layer, from which this attack reads samples"
        )
    return FirstLayer(names[0], biases[0], after[0], units)


def site_training_rows(client: Any, fed: Federation) -> Tensor:
    """Return the training samples of a site as the model receives them, ``[n, features]`` float64."""
    index = fed.indices("train", client)[:MAX_COMPARED_SAMPLES]
    rows = fed.fetch(index)
    if not rows.is_floating_point():
        raise InapplicableAttack("the samples are text")
    return rows.reshape(len(index), -1).double()


def craft_bins(rogue: RogueServer, layer: FirstLayer, rows: Tensor) -> bytes:
    """Return a model whose first layer sorts samples into bins along one direction, with a unit for each edge.

    The gradients of two neighboring units differ by the samples between their edges, so a bin with one sample reveals
    the sample. (L. Fowl et al., "Robbing the fed", ICLR 2022.)

    Args:
        rogue: the server.
        layer: the first layer.
        rows: samples that determine the edges of the bins. A real server would estimate the distribution of the samples
            from similar data.
    """
    job = rogue.trainer.job
    down, _ = rogue.first_download()
    tree = {k: part.clone() for k, part in job.oracle.layout.tree(down[0].reshape(1, -1).double()).items()}
    direction = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction /= direction.norm() * max(float(rows.abs().max()), 1e-9)
    places = torch.sort(rows @ direction).values
    edges = torch.quantile(places, torch.linspace(0, 1, layer.units + 1, dtype=torch.float64)[:-1])
    edges = edges - 1e-6 * (places[-1] - places[0]).clamp(min=1e-6)
    tree[layer.weight][0] = UNIT_SCALE * direction
    tree[layer.bias][0] = -UNIT_SCALE * edges
    column = torch.linspace(-1, 1, tree[layer.following].shape[1], dtype=torch.float64)
    tree[layer.following][0] = column[:, None]
    return rogue.write(job.oracle.layout.flatten(tree)[0])


def read_bins(layer: FirstLayer, job: Job, change: Tensor) -> Tensor:
    """Return the candidate samples ``[k, features]`` that a change of the crafted model reveals."""
    tree = job.oracle.layout.tree(change.double().reshape(1, -1))
    weight, bias = tree[layer.weight][0], tree[layer.bias][0]
    weights = torch.cat([weight, weight[:-1] - weight[1:]])
    biases = torch.cat([bias, bias[:-1] - bias[1:]])
    is_moved = biases != 0
    return weights[is_moved] / biases[is_moved, None]


def count_recovered(candidates: Tensor, rows: Tensor) -> int:
    """Return the number of samples that at least one candidate matches up to a relative error of `READ_ERROR`."""
    finite = candidates[candidates.isfinite().all(1)]
    if not len(finite):
        return 0
    distance = torch.cdist(rows, finite).min(1).values
    return int((distance <= READ_ERROR * rows.norm(dim=1).clamp(min=1e-12)).sum())


def compute_change(job: Job, fields: dict[str, Tensor]) -> Tensor:
    """Return the change of the model ``[d]`` in an upload or a sum of uploads.

    Raises:
        InapplicableAttack: the method's uploads are not changes of the model.
    """
    for name, kind in job.fields.items():
        field = fields.get(name)
        if kind.primary and field is not None and field.numel() == job.oracle.layout.d:
            if is_absolute_model(kind, field.numel(), job.oracle.layout.d) or kind.keeps:
                break
            return field.reshape(-1)
    raise InapplicableAttack(
        f"uploads of {type(job.algorithm).__name__} are not model updates, and this attack reads model updates"
    )


def ask_change(site: RehearsedSite, rogue: RogueServer, download: bytes) -> Tensor | None:
    """Request one round with a model, and return the resulting change of the model, or None if no change arrives.

    The change is taken from the upload, or from the sum of uploads.
    """
    job = rogue.trainer.job
    if site.site.secure is not None:
        session, terms = play_session(site, rogue, 1, download)
        if not session.is_open or site.client not in session.vectors:
            return None
        vector = UploadVector(job, rogue.trainer.forms.idle)
        sums, _, _ = vector.decode(session.total(terms)[: vector.length], site.clients, 1.0)
        return compute_change(job, sums)
    upload = rogue.ask(site.client, "train", download, round=1, weight=1 / site.clients, scored=-1)
    if upload is None:
        return None
    up = rogue.trainer.forms.read_up(upload, site.client, rogue.trainer.forms.read_down(download)).up
    return compute_change(job, up._asdict())


def describe_protection(site: RehearsedSite) -> str:
    """Return the protection of a site's upload: masks, noise, or nothing."""
    trainer = site.copy().trainer
    if get_site_noise(deployed_setting(trainer.experiment.methods[0].setting, site.site.survivors)) is not None:
        return "noise"
    return "nothing" if site.site.secure is None else "masks"


def read_single_upload(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of an attack on this site's upload alone."""
    rogue, c = site.rogue(), site.client
    tried = "this site's upload alone, and its masked values in two sessions"
    upload = rogue.ask(c, "train", rogue.download(), round=1, weight=1 / site.clients, scored=-1)
    if site.site.secure is not None:
        numbers = set[bytes]()
        for _ in range(2):
            session, download = rogue.begin(1), rogue.download()
            session.vector(c, rogue.terms(1, download), download)
            numbers.add(session.vectors.get(c, b"")[SIGNATURE_BYTES:])
        is_open = upload is not None or len(numbers) == 1
        return judge_attack(
            is_open, tried, "every upload is masked, and each session draws new masks", "an upload without masks"
        )
    tried = "one round with an honest model"
    if upload is None:
        return AttackOutcome("stopped", tried, "nothing", f"the site refuses: {rogue.refused[-1]}")
    learned = f"the whole upload, {len(upload):,} bytes"
    if describe_protection(site) == "noise":
        return AttackOutcome("remains", tried, f"{learned}, with its noise", "epsilon counts each upload")
    return AttackOutcome(
        "OPEN", tried, learned, "there are no masks and no noise. Use secure aggregation, or trust the server"
    )


def read_by_bins(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of reading samples from a single answer to a model that sorts them into bins (R6)."""
    rogue = site.rogue()
    rows = site_training_rows(site.client, site.fed)
    layer = find_first_layer(rogue.trainer.job, rows.shape[1])
    change = ask_change(site, rogue, craft_bins(rogue, layer, rows))
    count = 0 if change is None else count_recovered(read_bins(layer, rogue.trainer.job, change), rows)
    tried = f"one crafted model with {layer.units} bins"
    learned = f"{count} of {len(rows)} training samples, to {READ_ERROR:.0%}"
    protection = describe_protection(site)
    if count and protection == "masks":
        remains = "a sum hides the origin of samples, not the samples. Add noise (delta), or trust the server"
        return AttackOutcome("remains", tried, f"{learned}, in the sum of a round", remains)
    rule = "noise (delta)" if protection != "masks" else "training blurs individual samples. Noise (delta) hides them"
    return judge_attack(bool(count), tried, rule, learned, "0 samples")


def craft_questions(rogue: RogueServer, rows: Tensor | None) -> Iterator[bytes]:
    """Yield models that a site might answer only if it has, or only if it lacks, a certain sample."""
    down, _ = rogue.first_download()
    first, draws = down[0].double(), torch.Generator().manual_seed(1)
    noise = torch.randn(first.shape, generator=draws, dtype=torch.float64)
    units = torch.arange(first.numel()).reshape(first.shape)
    for k in range(QUESTION_COUNT):
        how, power = k % 6, 10.0 ** (-300 + 600 * k / QUESTION_COUNT)
        if how == 0:
            yield rogue.write(noise * power)
        elif how == 1:
            yield rogue.write(torch.where(units % (2 + k) == 0, first - 1e3, first))
        elif how == 2:
            yield rogue.write(torch.where(noise > 2 - k / 8, noise * 1e6, first))
        elif how == 3:
            numbers = (float("nan"), float("inf"), -float("inf"), 1e308, 5e-324)
            yield rogue.write(torch.where(units == k, torch.full_like(first, numbers[k // 6 % len(numbers)]), first))
        elif how == 4 or rows is None:
            yield rogue.write(first + 1e-9 * noise)
        else:
            yield _craft_threshold(rogue, rows, float(10 ** (k / 3)))


def _craft_threshold(rogue: RogueServer, rows: Tensor, gain: float) -> bytes:
    """Return a model with a huge unit that is activated only by the first sample."""
    job = rogue.trainer.job
    layer = find_first_layer(job, rows.shape[1])
    tree = job.oracle.layout.tree(torch.zeros(1, job.oracle.layout.d, dtype=torch.float64))
    direction = rows[0] / rows[0].norm().clamp(min=1e-12)
    farthest = (rows[1:] @ direction).max() if len(rows) > 1 else torch.zeros(())
    tree[layer.bias][:] = -1.0
    tree[layer.weight][0, 0] = gain * direction
    tree[layer.bias][0, 0] = -gain * float(rows[0] @ direction + farthest) / 2
    tree[layer.following][0, :, 0] = gain
    return rogue.write(job.oracle.layout.flatten(tree)[0])


def change_first_sample(site: RehearsedSite) -> Federation:
    """Return the site's samples with a different first sample, but with the same published facts.

    The other sample has the largest value in each feature. If this changes a published fact, the other sample is a copy
    of another sample of the site.

    Raises:
        InapplicableAttack: every other sample changes a published fact.
    """
    fed = site.fed
    rows = torch.cat([fed.indices(part, site.client) for part in ("train", "validation", "test")])
    figures = site.copy().figures
    for sample in (fed.data.x[rows].amax(0), *fed.data.x[rows[1:MAX_REPLACEMENT_SAMPLES]]):
        x = fed.data.x.clone()
        x[fed.indices("train", site.client)[0]] = sample
        changed = replace(fed, data=replace(fed.data, x=x))
        if site.copy(changed).figures == figures:
            return changed
    raise InapplicableAttack(
        "every candidate replacement for the first sample would change a fact that the site publishes"
    )


def compare_twins(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of sending crafted models to two copies of the site that differ in one sample.

    All numbers except the masked numbers are compared.
    """
    if site.site.secure is None and not site.copy().trainer.private:
        raise InapplicableAttack(
            "the server receives this site's answers directly. See the table row about single uploads"
        )
    twins = [site.copy(**BUDGET_SETTINGS), site.copy(change_first_sample(site), **BUDGET_SETTINGS)]
    rogues = [site.rogue(twin) for twin in twins]
    try:
        rows: Tensor | None = site_training_rows(site.client, twins[1].trainer.fed)
        find_first_layer(rogues[0].trainer.job, rows.shape[1] if rows is not None else 0)
    except InapplicableAttack:
        rows = None
    differing, questions, end = 0, 0, time.monotonic() + QUESTION_SECONDS
    for download in craft_questions(rogues[0], rows):
        questions += 1
        differing += len({_observe_answer(site, rogue, download) for rogue in rogues}) > 1
        if time.monotonic() > end:
            break
    return judge_attack(
        differing > 0,
        f"{questions} crafted models, sent to two copies of the site that differ in one sample",
        "a rejection, its text and its length depend only on the message",
        f"{differing} of {questions} answers distinguish the two samples",
        f"0 of {questions} answers differ",
    )


def _observe_answer(site: RehearsedSite, rogue: RogueServer, download: bytes) -> tuple[Any, ...]:
    """Return everything that a server can observe of the answer to a model before any sum is opened."""
    before = len(rogue.refused)
    length = ask_upload(site, rogue, 1, download)
    return (tuple(rogue.refused[before:]), length)


def ask_upload(site: RehearsedSite, rogue: RogueServer, t: int, download: bytes) -> int:
    """Ask the site alone for its upload of a round, and return the upload's size in bytes, or 0 if there is none.

    If masks are agreed on, the upload is masked.
    """
    c = site.client
    if site.site.secure is None:
        return len(rogue.ask(c, "train", download, round=t, weight=1 / site.clients, scored=-1) or b"")
    session = rogue.begin(t)
    session.vector(c, rogue.terms(t, download), download)
    return len(session.vectors.get(c, b""))


def guess_members(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of guessing the training samples from the new model's loss, as a test for memorization."""
    rogue = site.rogue()
    job, (down, _) = rogue.trainer.job, rogue.first_download()
    change = ask_change(site, rogue, rogue.download())
    tried = "the model's loss after one round on training samples and held-out samples"
    if change is None:
        return AttackOutcome("stopped", tried, "nothing", "the round has no result")
    model = down[0].reshape(-1) + change.to(down[0])
    losses = {part: _compute_losses(job, model, site.client, part) for part in ("train", "validation", "test")}
    inside, outside = losses["train"], torch.cat([losses["validation"], losses["test"]])
    if not len(inside) or not len(outside) or not bool(torch.cat([inside, outside]).isfinite().all()):
        raise InapplicableAttack("the site has no training or held-out samples to compare, or a loss is not finite")
    ranks = (outside[:, None] > inside[None]).double() + 0.5 * (outside[:, None] == inside[None]).double()
    area = float(ranks.mean())
    learned = f"AUROC {area:.2f} (chance: 0.50)"
    if area >= MEMORIZED_AUROC:
        return AttackOutcome(
            "OPEN", tried, learned, "the model memorizes. Use fewer epochs, a smaller model, or noise (delta)"
        )
    return AttackOutcome(
        "remains", tried, learned, "a model reveals something about its training samples. Noise (delta) limits it"
    )


def _compute_losses(job: Job, model: Tensor, client: int, part: str) -> Tensor:
    """Return the losses of a model on one part of the site's samples."""
    outputs, index, _ = pass_shared(job, model, torch.tensor([client]), part)
    return job.oracle.task.loss(outputs, job.eval_fed.targets(index)).flatten()[:MAX_COMPARED_SAMPLES]


SAMPLE_ATTACKS: Sequence[tuple[str, Any]] = (
    ("single upload", read_single_upload),
    ("is this row in the data? (rejections)", compare_twins),
    ("bins of one row (crafted model)", read_by_bins),
    ("models that memorize", guess_members),
)
