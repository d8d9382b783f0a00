"""What a site's refusals show of its samples to a server that crafts messages: nothing, under secure aggregation.

Two sites have data sets that differ. Whatever they are sent, they answer with the same status, sentence and length, and
write the same files in the same order. The attacks that once read samples from refusals are played at the end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from fedloom.algorithms import REGISTRY
from fedloom.engine.clients.chunk import ClientOutput, ClientState
from fedloom.errors import CheckpointError, Refused, RunDirError, WireError
from fedloom.lab.experiment import parse
from fedloom.seeds import numpy_generator
from fedloom.storage import disk
from fedloom.version import __version__
from fedloom_sites.deploy.protocol.envelope import (
    COMMON_FIELDS,
    PROTOCOL_VERSION,
    REQUEST_FIELDS,
    digest_arrays,
    seal_message,
)
from fedloom_sites.deploy.protocol.public import PublicReason, check_private, publish_reasons
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure import shares
from fedloom_sites.deploy.secure.counters import counters_bytes
from fedloom_sites.deploy.secure.member import SessionMember, check_maskable
from fedloom_sites.deploy.secure.terms import SessionTerms
from fedloom_sites.deploy.secure.vectors import UploadVector
from fedloom_sites.deploy.site import client as client_module
from fedloom_sites.deploy.site import trainer as trainer_module
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.local_data import part_sizes
from fedloom_sites.transport import node as node_module
from tests.deploy.scene import Scene, document, signing_key_of
from tests.deploy.sessions import secured, sum_honestly
from tests.deploy.test_dishonest import Rogue

pytestmark = pytest.mark.attack("also for scores. A dishonest server")

SITES = 3
THREE: dict[str, Any] = {
    "partition": {"kind": "dirichlet", "clients": SITES, "alpha": 0.5, "max_train_per_client": 16},
    "evaluate": {"every": 1},
    "local": {"lr": 0.05, "epochs": 1, "batch_size": 200},
}
MLP = {"model": {"kind": "mlp", "hidden": [20]}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


def maskable() -> list[str]:
    """The methods that can be summed under masks."""
    names = []
    for name in REGISTRY:
        given = {"algorithm": name, **({"layers": ["head.bias"]} if name == "fedbn" else {})}
        try:
            check_maskable(parse(document(given)).methods[0].setting)
        except Refused:
            continue
        names.append(name)
    return [name for name in names if name != "centralized"]


def test_a_server_that_greets_a_growing_table_sees_few_of_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greeted after every new patient, a site would tell its class and its cells; in time the run goes on."""
    rogue = Rogue(secured(tmp_path, "fedavg", **THREE))
    site, day = rogue.sites[0], 1

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2026, 12, day, tzinfo=tz)

    def greet(state: str) -> bool:
        monkeypatch.setitem(site.trainer.__dict__, "samples", state)
        return rogue.exchange(0, "hello")[0]["status"] == "ok"

    monkeypatch.setattr(client_module, "datetime", Clock)
    assert greet("start")
    assert [greet(f"{k} more") for k in range(8)] == [True] * 4 + [False] * 4
    assert greet("3 more"), "the table as it was"
    day = 2
    assert [greet("8 more"), greet("9 more"), greet("8 more")] == [True, False, True]
    day = 1  # a clock that goes back
    assert not greet("9 more")
    day = 3
    assert greet("9 more")


class Draws:
    """What a generated message needs of randomness, from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = numpy_generator(seed, purpose="test")

    def random(self) -> float:
        return float(self._generator.random())

    def choice(self, some: Sequence[Any]) -> Any:
        return some[int(self._generator.integers(len(some)))]

    def below(self, least: int, most: int) -> int:
        return int(self._generator.integers(least, most))

    def bytes(self, count: int) -> bytes:
        return self._generator.bytes(count)


# ------------------------------------------------------------------------------------------------- non-interference


def with_samples(client: Client, change: Callable[[Tensor], Tensor]) -> Client:
    """A site whose features are others; sizes and labels, and so all that it publishes, stay."""
    fed = client.trainer.fed
    rows = torch.cat([fed.indices(part, client.site.client) for part in ("train", "validation", "test")])
    x = fed.data.x.clone()
    x[rows] = change(x[rows])
    client.trainer.__dict__["_fed"] = replace(fed, data=replace(fed.data, x=x))
    return client


class Seen(NamedTuple):
    """What one site made of one message: all of it that does not depend on the randomness of its masks."""

    status: str
    reason: str
    lengths: tuple[int, ...]
    numbers: tuple[str, ...]
    files: tuple[tuple[str, str, int], ...]


@contextmanager
def recorded(folder: Path) -> Iterator[list[tuple[str, str, int]]]:
    """The operations on the disk, in their order, with the name and the length of each file."""
    found = list[tuple[str, str, int]]()

    def note(op: str, path: Path) -> None:
        size = path.stat().st_size if path.is_file() and path.suffix not in (".jsonl",) else 0
        found.append((op, re.sub(r"[0-9a-f]{8,}|\.tmp.*", "", str(path).replace(str(folder), "")), size))

    disk.hook = note
    try:
        yield found
    finally:
        disk.hook = None


class Generated:
    """A server that makes up messages to one site, from sessions in which the others are real.

    Args:
        here: the deployment.
        client: the site, for the shapes of messages.
        seed: of all that is made up.
    """

    def __init__(self, here: Scene, client: Client, seed: int) -> None:
        self._here, self._client, self._draw = here, client, Draws(seed)
        self._others = {
            c: SessionMember(
                here.sites[c].with_(state=here.folder / f"state-{c}"), signing_key_of(c), here.folder / f"peer-{c}"
            )
            for c in range(1, SITES)
        }
        self._sizes = tuple(tuple(fed_sizes(here, c)) for c in range(SITES))
        self._job, self._server = client.trainer.job, client.trainer.node.server
        self._down = self._job.down(self._server, 1, client.trainer.ids)
        self._round, self._nonce, self._adverts = 1, bytes(16), b""
        self._vector, self._stage = b"", "keys"

    def message(self, last: bytes | None) -> tuple[str, list[bytes], dict[str, Any]]:
        """The next message: its kind, its arrays and fields of its head; ``last`` is what the site answered last."""
        draw, kinds = self._draw, ("keys", "shares", "masked", "tally", "agree", "count", "unmask", "open", "score")
        if draw.random() < 0.15:
            kind = draw.choice((*kinds, "hello", "train", "ask", "result", "analysis"))
            arrays = [draw.bytes(draw.choice((0, 1, 68, 2000))) for _ in range(draw.below(0, 4))]
            return kind, arrays, {"session": self._nonce, "round": draw.below(-1, 6)}
        return self._step(last)

    def _step(self, last: bytes | None) -> tuple[str, list[bytes], dict[str, Any]]:
        draw = self._draw
        stage = self._stage if last is not None else "keys"
        fields = {"session": self._nonce, "round": self._round, "accepted": 0}
        if stage == "keys":
            self._round = draw.choice((1, 1, 1, 2, 3, 4))
            self._nonce, self._stage = draw.bytes(16), "shares"
            return "keys", [], {"session": self._nonce, "round": self._round}
        if stage == "shares":
            assert last is not None
            others = [secure.read_adverts(m.keys(self._round, self._nonce))[0] for m in self._others.values()]
            self._adverts = secure.write_adverts([*secure.read_adverts(last), *others])
            self._stage = "masked"
            return "shares", [self._adverts], fields
        if stage == "masked":
            self._stage = "count"
            return self._masked(fields)
        assert last is not None
        if stage == "count":
            self._vector, self._stage = last, "unmask"
            signed = secure.join_parts(dict.fromkeys(range(SITES), last[:64]))
            digest = hashlib.sha256(self._counters).digest()
            return draw.choice((("count", [signed, digest], fields), ("count", [signed, digest], fields),
                                ("agree", [signed], fields)))  # fmt: skip
        self._stage, signed = "keys", secure.join_parts(dict.fromkeys(range(SITES), self._vector[:64]))
        return "unmask", [signed, self._counters, last], fields

    @property
    def _counters(self) -> bytes:
        """The site's counters in the name of all sites."""
        return secure.join_parts(dict.fromkeys(range(SITES), self._vector[-counters_bytes(SITES) :]))

    def _masked(self, fields: dict[str, Any]) -> tuple[str, list[bytes], dict[str, Any]]:
        draw, t, trains = self._draw, self._round, self._draw.random() < 0.8
        sent = {c: m.shares(t, self._nonce, self._adverts) for c, m in self._others.items()}
        inbox = secure.join_parts({c: secure.split_parts(m, shares.SEALED_SHARE_BYTES)[0] for c, m in sent.items()})
        download = self._download()
        model = self._client.trainer.forms.write_models(self._down, self._job.algorithm.global_model(self._server))
        scored = draw.choice((-1, t - 1)) if trains else t
        models = model if scored >= 0 else []
        figures = (self._client.answers.figures,) * SITES if scored >= 0 else ()
        terms = SessionTerms(
            round=t, trains=trains, sizes=self._sizes, cohort=range(SITES), accepted=(0,) * SITES,
            download=hashlib.sha256(download).hexdigest() if trains else "", scored=scored, common=bool(models),
            models=tuple(hashlib.sha256(m).hexdigest() for m in models), figures=figures,
        )  # fmt: skip
        if draw.random() < 0.1:
            terms = terms.with_(sizes=tuple((a + 1, b, c) for a, b, c in terms.sizes))
        arrays = [*([download] if trains else []), terms.encode(), inbox, *models]
        return ("masked" if trains else "tally"), arrays, fields

    def _download(self) -> bytes:
        """A crafted model: of any scale, with dead units, with one live unit, or with numbers that are none."""
        draw, down = self._draw, self._down
        if not down:
            return self._client.trainer.forms.write_down(down, self._server)
        row = torch.from_numpy(numpy_generator(draw.below(0, 10**6), purpose="test").standard_normal(down[0].numel()))
        row = row.reshape(down[0].shape).to(down[0])
        how = draw.below(0, 6)
        if how == 0:
            row = row * 10.0 ** draw.choice((-300, -9, 0, 3, 9, 60, 200, 300))
        elif how == 1:
            row = down[0] - 1e3 * (torch.arange(row.numel()) % draw.choice((2, 3, 7)) == 0).to(row).reshape(row.shape)
        elif how == 2:
            row = torch.where(row > 4 * draw.random() - 2, row * 1e6, down[0])
        elif how == 3:
            row[..., draw.below(0, row.shape[-1])] = draw.choice((float("nan"), float("inf"), 1e308))
        elif how == 4:
            row = down[0] + 1e-9 * row
        return self._client.trainer.forms.write_down(type(down)(row, *down[1:]), self._server)


EXTREME_VALUES = (
    -1,
    0,
    2**63,
    2**64,
    10**400,
    -0.5,
    float("nan"),
    float("inf"),
    1e308,
    True,
    None,
    "",
    "f" * 9,
    [],
    {},
)


class Forged(Generated):
    """A server whose terms are those of an honest session but for one field, which is forged in every possible way."""

    forgeries = tuple(
        (name, value)
        for value in (*EXTREME_VALUES, *([value] * SITES for value in EXTREME_VALUES), [[2**63, 1, 1]] * SITES)
        for name in SessionTerms.model_fields
    )

    def message(self, last: bytes | None) -> tuple[str, list[bytes], dict[str, Any]]:
        return self._step(last if self._stage in ("shares", "masked") else None)

    def _masked(self, fields: dict[str, Any]) -> tuple[str, list[bytes], dict[str, Any]]:
        kind, arrays, fields = super()._masked(fields)
        place = int(kind == "masked")
        (name, value), self.forgeries = self.forgeries[0], self.forgeries[1:]
        arrays[place] = json.dumps(json.loads(arrays[place]) | {name: value}).encode()
        return kind, arrays, fields


def fed_sizes(here: Scene, c: int) -> list[int]:
    client = Client(here.sites[c].with_(state=here.folder / f"sizes-{c}"))
    return part_sizes(client.trainer.fed, c)


@contextmanager
def equal_secrets() -> Iterator[None]:
    """Two sites draw the same keys in the same session, so that both can be sent the same messages."""
    numbers = itertools.count()

    def secrets() -> secure.SessionSecrets:
        draw = Draws(next(numbers))
        keys = (X25519PrivateKey.from_private_bytes(draw.bytes(32)).private_bytes_raw() for _ in range(2))
        return secure.SessionSecrets(*keys, draw.bytes(32), draw.bytes(32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure, "new_secrets", secrets)
        yield


def transcripts(
    here: Scene, changes: list[Callable[[Tensor], Tensor]], count: int, seed: int, make: type[Generated] = Generated
) -> list[list[Seen]]:
    """What sites that differ in their samples alone make of the same generated messages."""
    found = []
    for k, change in enumerate(changes):
        client = with_samples(Client(here.sites[0].with_(state=here.folder / f"twin-{k}")), change)
        blank: dict[type, Any] = {int: 0, float: 0.0, bool: False, bytes: b"", str: "", list: []}
        transcript, last = list[Seen](), None
        with equal_secrets():
            server = make(here._replace(folder=here.folder / f"server-{k}"), client, seed)
            for _ in range(count):
                kind, arrays, fields = server.message(last)
                head = {name: blank[type_] for name, type_ in (COMMON_FIELDS | REQUEST_FIELDS[kind]).items()}
                head |= {"protocol": PROTOCOL_VERSION, "release": __version__, "experiment": here.server.fingerprint}
                known = {name: value for name, value in fields.items() if name in head}
                content = seal_message(head | {"kind": kind, "digest": digest_arrays(arrays)} | known, arrays)
                with recorded(client.site.state) as files:
                    reply = client.reply(content)
                answer = [array.data for array in reply["arrays"].values()]  # type: ignore[union-attr]
                last = answer[0] if answer and reply["head"]["status"] == "ok" else None
                numbers = tuple(sorted(reply["metrics"])) if "metrics" in reply else ()
                what = (str(reply["head"]["status"]), str(reply["head"]["reason"]), tuple(map(len, answer)))
                transcript.append(Seen(*what, numbers, tuple(files)))
        found.append(transcript)
    return found


CHANGES: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x.flip(-1), torch.zeros_like, lambda x: x * 15]
"""Features of the twins: as they are, mirrored, all zero, and far beyond the others'."""
BUDGET = {"models_per_round": 10**6, "models_in_run": 10**6}


def guarded(here: Scene, **more: Any) -> Scene:
    """With protections that look at samples, and no budget that would end the messages."""
    sites = [s.with_(dead_units=0.5, **BUDGET, **more) for s in here.sites]
    return here._replace(sites=sites)


@pytest.mark.parametrize("name", maskable())
@pytest.mark.parametrize("count", [24, pytest.param(250, marks=pytest.mark.slow)])
def test_what_a_site_answers_depends_on_messages_alone(name: str, count: int, tmp_path: Path) -> None:
    given = {"algorithm": name, **({"layers": ["head.bias"]} if name == "fedbn" else {})}
    here = guarded(secured(tmp_path, given, SITES, agreed={"norm_bound": 5.0, "scores": "masked"}, **THREE))
    first, *others = transcripts(here, CHANGES[:: 1 if count > 24 else 3], count, seed=len(name))
    statuses = {(one.status, bool(one.lengths)) for one in first}
    assert ("ok", True) in statuses
    assert ("refused", False) in statuses
    for other in others:
        for k, (mine, theirs) in enumerate(zip(first, other, strict=True)):
            assert mine == theirs, f"message {k}"


@pytest.mark.parametrize("count", [90, pytest.param(3 * len(Forged.forgeries), marks=pytest.mark.slow)])
def test_forged_terms_show_nothing_of_samples(count: int, tmp_path: Path) -> None:
    """Every field of the terms holds each extreme value once: numbers, texts and lists that are none, and overflows."""
    here = guarded(secured(tmp_path, "fedavg", SITES, agreed={"norm_bound": 5.0, "scores": "masked"}, **THREE))
    first, other = transcripts(here, CHANGES[:2], count, seed=5, make=Forged)
    assert first == other
    assert sum(one.status == "refused" for one in first[2::3]) > count / 6


# --------------------------------------------------------------------------------------- attacks by refusals, at chance

QUESTIONS = 400
MOST_RIGHT = 0.58
"""Of 400 fair coins at most 58 % are guessed right, but once in 1,600 times (a binomial's tail)."""
ANSWER = 64 + 8 * (1510 + 4) + counters_bytes(SITES)
"""Bytes of a vector of the model with its counters, under masks."""


class Attack(NamedTuple):
    """Crafted models, of which a site with one sample more might refuse some.

    Attributes:
        gain: of a live unit.
        weight: of the units in the logits.
        live: units that only the sample makes live, of 20.
        agreed: settings of secure aggregation.
        site: settings of the site.
        pixel: whether the data sets differ in one pixel of one sample, and not in the sample.
    """

    gain: float
    weight: float
    live: int
    agreed: dict[str, Any]
    site: dict[str, Any]
    pixel: bool = False


ATTACKS = {
    "a threshold between two values of a pixel": Attack(1e6, 1.0, 1, {"norm_bound": 5.0}, {}, pixel=True),
    "a unit whose gradient is longer than the bound": Attack(1e6, 1.0, 1, {"norm_bound": 5.0}, {}),
    "a unit that overflows, without any bound": Attack(1e200, 1e200, 1, {}, {}),
    "units that answer to no other sample, under dead_units": Attack(
        1.0, 1.0, 12, {"norm_bound": 5.0}, {"dead_units": 0.5}
    ),
}


def holding(here: Scene, folder: str, sample: Tensor | None) -> Client:
    """The first site, whose first training sample is the one that is asked for, or stays as it is."""
    client = Client(here.sites[0].with_(state=here.folder / folder))
    fed = client.trainer.fed
    row = fed.indices("train", 0)[:1]
    x = fed.data.x.clone()
    if sample is not None:
        x[row] = sample.to(x)
    for name in ("_fed", "fed"):
        client.trainer.__dict__[name] = replace(fed, data=replace(fed.data, x=x))
    return client


def crafted(rogue: Rogue, attack: Attack, direction: Tensor, threshold: float) -> bytes:
    """A model with units that are live where a sample is beyond a threshold in a direction, and others."""
    job, server = rogue.trainer.job, rogue.trainer.node.server
    down = job.down(server, 1, rogue.trainer.ids)
    rows = {name: torch.zeros_like(part) for name, part in job.oracle.layout.tree(down[0].reshape(1, -1)).items()}
    units = rows["fc1.bias"].shape[1]
    rows["fc1.bias"][:] = 1.0 if attack.live > 1 else -1.0
    rows["fc1.bias"][0, : attack.live] = -attack.gain * threshold
    rows["fc1.weight"][0, : attack.live] = attack.gain * direction.flatten().double()
    rows["head.weight"][0, :2] = attack.weight  # two classes, one of which is wrong
    assert units == 20
    flat = torch.cat([rows[name].flatten() for name in rows])
    return rogue.trainer.forms.write_down(type(down)(flat.reshape(down[0].shape), *down[1:]), server)


@pytest.mark.parametrize("name", ATTACKS)
def test_refusals_tell_no_sample_from_another(name: str, tmp_path: Path) -> None:
    """Does this site have this patient, this pixel? 400 questions about data sets that differ in one sample.

    The server guesses by status, sentence and length of the answer, before any sum is opened.
    """
    attack = ATTACKS[name]
    here = secured(tmp_path, "fedavg", SITES, agreed=attack.agreed, **THREE, **MLP, rounds=1)
    here = here._replace(sites=[s.with_(**BUDGET, **attack.site) for s in here.sites])
    patient = torch.full((1, 8, 8), 16, dtype=torch.uint8)  # brighter than any digit along every direction
    rogue, right = Rogue(here), 0
    darker = patient.clone()
    darker[0, 0, 0] = 8
    without = darker if attack.pixel else None
    sites = {held: holding(here, f"held-{held}", patient if held else without) for held in (True, False)}
    fed, other_fed = (sites[held].trainer.fed for held in (True, False))
    sample, *others = fed.fetch(fed.indices("train", 0)).reshape(-1, 64)
    others.append(other_fed.fetch(other_fed.indices("train", 0)[:1]).reshape(64))
    draws = numpy_generator(7, purpose="test")
    session = None
    for k in range(QUESTIONS):
        held = bool(k % 2)
        noise = torch.from_numpy(draws.random(64)).to(sample)
        direction = (sample.abs().max() * noise) / noise.norm()
        threshold = float(direction @ sample + max(direction @ other for other in others)) / 2
        rogue.sites[0] = sites[held]
        session = rogue.begin(1, range(SITES))
        before, download = len(rogue.refused), crafted(rogue, attack, direction, threshold)
        terms = rogue.terms(1, download, cohort=range(SITES))
        session.vector(0, terms, download)
        answer, told = session.vectors.get(0, b""), rogue.refused[before:]
        guess = bool(told) or len(answer) != ANSWER
        right += (guess if attack.live == 1 else not guess) == held
    assert right <= MOST_RIGHT * QUESTIONS, f"{right} of {QUESTIONS}"


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_model_that_makes_the_uploads_of_all_sites_but_one_too_long(
    is_checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit answers to a patient whom one site does not have, and its gradient is huge at the others.

    Without the check, their uploads are scaled down to the bound, and the sum is the upload of that site but for the
    coordinates of the unit.
    """
    single, bright = 4, torch.ones(64, dtype=torch.float64) / 8
    rogue = Rogue(secured(tmp_path, "fedavg", agreed={"norm_bound": 5.0}, **MLP))
    for client in rogue.sites[:single]:
        fed, c = client.trainer.fed, client.site.client
        x = fed.data.x.clone()
        x[fed.indices("train", c)[:1]] = 16  # brighter than any digit
        for name in ("_fed", "fed"):
            client.trainer.__dict__[name] = replace(fed, data=replace(fed.data, x=x))
    if not is_checked:
        monkeypatch.setattr(trainer_module, "clip_upload", lambda *_: (None, False))
    job, down = rogue.trainer.job, rogue.first_download()[0]
    fed = rogue.sites[single].trainer.fed
    brightest = float((fed.fetch(fed.indices("train", single)).reshape(-1, 64).double() @ bright).max())

    def tree(row: Tensor) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in job.oracle.layout.tree(row.reshape(1, -1)).items()}

    rows = tree(down[0])
    rows["fc1.weight"][0, 0] = 1e5 * bright
    rows["fc1.bias"][0, 0] = -1e5 * (brightest + 0.05)
    rows["head.weight"][0, :2, 0] = 1e5
    download = rogue.write(torch.cat([part.flatten() for part in rows.values()]))
    session = sum_honestly(rogue, 1, download)
    kept = [site._memory.read(1) for site in rogue.sites]
    assert [one and one.reply["neutral"] for one in kept] == [int(is_checked)] * single + [0]
    assert session.is_open is not is_checked
    if is_checked:
        assert "only 1 site answered from their samples" in rogue.refused[-1]
        return
    vector, own = UploadVector(job, rogue.trainer.forms.idle), kept[single]
    assert own is not None
    total, mine = (
        tree(vector.decode(one, count, 1.0)[0]["dw"])["fc1.weight"][0, 1:]  # of the other units
        for one, count in (
            (session.total(rogue.terms(1, download)), 5), (own.tensors["reply"].numpy().view(np.uint64), 1),
        )
    )  # fmt: skip
    assert float((total - mine).norm()) < 0.05 * float(mine.norm())


# ------------------------------------------------------------------------------------------- sentences, and the budget


def test_no_sentence_is_made_where_samples_can_be_read(tmp_path: Path) -> None:
    """A place whose errors leave the site cannot read a sample, and other errors than its own do not leave."""
    client = secured(tmp_path, "fedavg", SITES, **THREE).clients()[0]
    assert client.trainer.fed is client.trainer.fed
    with pytest.raises(RuntimeError, match="samples were read in code whose error messages leave"), publish_reasons():
        _ = client.trainer.fed
    with pytest.raises(PublicReason, match="a sentence"), publish_reasons():
        raise Refused("a sentence")
    with publish_reasons(), pytest.raises(PublicReason), publish_reasons():
        raise Refused("a sentence")
    check_private()


@pytest.mark.parametrize(
    "error", [RunDirError, CheckpointError, WireError, Refused, secure.ProtocolBroken, PublicReason, ValueError]
)
def test_an_error_of_the_training_is_a_neutral_upload_whatever_its_class(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of a user may raise any class of error, with a value of a sample in its sentence."""
    here = secured(tmp_path, "fedavg", SITES, **THREE)

    def fails(*_: Any) -> Any:
        raise error("patient 7 is 93 years old")

    monkeypatch.setattr(node_module, "run_clients", fails)
    rogue = Rogue(here)
    session, download = rogue.begin(1, range(SITES)), rogue.download()
    session.vector(0, rogue.terms(1, download, cohort=range(SITES)), download)
    assert not rogue.refused
    assert len(session.vectors[0]) == 64 + 8 * (650 + 4) + counters_bytes(SITES)


@pytest.mark.parametrize("error", [RunDirError, CheckpointError, WireError, secure.ProtocolBroken])
def test_an_error_that_was_not_made_without_samples_does_not_leave(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under masks the class of an error does not decide; its sentence is in the site's own log."""
    rogue = Rogue(secured(tmp_path, "fedavg", SITES, **THREE))

    def fails(*_: Any) -> Any:
        raise error("patient 7 is 93 years old")

    monkeypatch.setattr(rogue.sites[0].trainer, "weighed", fails)
    monkeypatch.setattr(SessionTerms, "weighed", fails)
    session, download = rogue.begin(1, range(SITES)), rogue.download()
    session.vector(0, rogue.terms(1, download, cohort=range(SITES)), download)
    assert rogue.refused == ["site site-0 could not answer. Its own log states the reason"]
    assert "patient 7 is 93 years old" in capsys.readouterr().err


@pytest.mark.parametrize("trains", [False, True])
def test_a_repeated_request_for_scores_does_not_tell_that_rows_have_changed(trains: bool, tmp_path: Path) -> None:
    """A session may stay open for as long as the server likes, and the model may look at one feature alone."""
    here = secured(tmp_path, "fedavg", SITES, **THREE)
    rogue = Rogue(here)
    session, model, download = rogue.begin(1, range(SITES)), rogue.model(), rogue.download() if trains else None
    terms = rogue.terms(1, download, [model], scored=1 - trains, common=True)
    answers = list[bytes]()
    for change in (CHANGES[0], CHANGES[0], CHANGES[1]):
        rogue.sites[0] = with_samples(Client(here.sites[0]), change)
        session.vector(0, terms, download, model)
        answers.append(session.vectors.pop(0))
    assert not rogue.refused
    assert len({*answers}) == 1


def test_models_under_masks_are_counted(tmp_path: Path) -> None:
    """Three models of a round, and twice as many as there are rounds in a run; the same again is none more."""
    here = secured(tmp_path, "fedavg", SITES, **THREE, rounds=3)
    rogue, model = Rogue(here), None

    def asked(t: int, change: float, scored: bool = False) -> str:
        download = None if scored else rogue.download(change)
        models = [rogue.trainer.forms.write_model(model * (1 + change))] if scored and model is not None else []
        more: dict[str, Any] = {"scored": t, "common": True} if scored else {}
        session, before = rogue.begin(t, range(SITES)), len(rogue.refused)
        session.vector(0, rogue.terms(t, download, models, cohort=range(SITES), **more), download, *models)
        return (rogue.refused[before:] or [""])[0]

    job, server = rogue.trainer.job, rogue.trainer.node.server
    model = job.algorithm.global_model(server)
    for scored, kind in ((False, "masked"), (True, "tally")):
        answers = [asked(1, change, scored) for change in (0.0, 0.1, 0.2, 0.1, 0.3, 0.2)]
        assert [bool(one) for one in answers] == [False] * 4 + [True, False]
        assert f"round 1: the site has already answered 3 models in messages of kind {kind}" in answers[4]
    later = [asked(t, change) for t in (2, 3) for change in (0.0, 0.1, 0.2)]
    assert [bool(one) for one in later] == [False] * 5 + [True]
    assert "8 models in messages of kind masked in this experiment" in later[-1]


def neutral(here: Scene, changes: list[Callable[[Tensor], Tensor]], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The neutral uploads, as integers, of sites that differ in their samples, after a round of training on these."""
    found, make = list[Tensor](), node_module.run_clients

    def fails(job: Any, down: Any, task: Any) -> Any:
        if task.round == 2:
            raise Refused("not finite")
        return make(job, down, task)

    monkeypatch.setattr(node_module, "run_clients", fails)
    for k, change in enumerate(changes):
        client = with_samples(Client(here.sites[0].with_(state=here.folder / f"twin-{k}")), change)
        rogue = Rogue(here)
        rogue.sites[0] = client
        for t, accepted in ((1, (0,) * SITES), (2, (1,) * SITES)):
            session, download = rogue.begin(t, range(SITES)), rogue.download(0.01 * t)
            session.vector(0, rogue.terms(t, download, cohort=range(SITES), accepted=accepted), download)
            assert not rogue.refused
        kept = client._memory.read(2)
        assert kept is not None
        found.append(kept.tensors["reply"])
    return found


@pytest.mark.parametrize("name", maskable())
def test_the_server_knows_a_neutral_upload(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same whatever the samples are, and whatever the site has learned from them before."""
    given = {"algorithm": name, **({"layers": ["head.bias"]} if name == "fedbn" else {})}
    here = secured(tmp_path, given, SITES, **THREE)
    if not here.clients()[0].trainer.job.fields:
        return
    first, other = neutral(here, [CHANGES[0], CHANGES[1]], monkeypatch)
    assert torch.equal(first, other)


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedadmm", "fedslr"])
def test_a_neutral_upload_adds_nothing_to_sums_of_changes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a method's own step without samples gives there: the site keeps the state that the sum follows."""
    here = secured(tmp_path, name, SITES, **THREE)
    [upload] = neutral(here, CHANGES[:1], monkeypatch)
    assert not upload[:-4].any()  # all before the work and the counter
    client = here.clients()[0].trainer
    job, idle = client.job, client.forms.idle
    output = ClientOutput(type(idle)(*map(torch.ones_like, idle)), ClientState(idle), torch.zeros(1, 3).long())
    vector, _, _ = UploadVector(job, idle).encode(output, 1.0, 1.0, None, is_neutral=True)
    parts = np.split(vector[:-4].view(np.int64), np.cumsum([field.shape[1] for field in idle])[:-1])
    for kind, part in zip(job.fields.values(), parts, strict=True):
        assert bool(part.any()) is not kind.accumulates


def test_dead_units_are_a_neutral_upload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The protection acts, its reason stays in the log of the site, and the share of units is in none."""
    here = secured(tmp_path, "fedavg", SITES, **THREE, **MLP)
    here = here._replace(sites=[s.with_(dead_units=0.5) for s in here.sites])
    rogue, attack = Rogue(here), ATTACKS["units that answer to no other sample, under dead_units"]
    download = crafted(rogue, attack, torch.ones(64), 1e9)
    session = rogue.begin(1, range(SITES))
    session.vector(0, rogue.terms(1, download, cohort=range(SITES)), download)
    kept = rogue.sites[0]._memory.read(1)
    assert not rogue.refused
    assert kept is not None
    assert kept.reply["neutral"] == 1
    assert not kept.tensors["reply"][:-4].any()
    assert "than dead_units = 0.5 allows" in capsys.readouterr().err


def test_sites_open_no_sum_of_neutral_uploads_whatever_the_server_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four sites have a result, and three must: the counters show it to every site."""
    cut = {"partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.5, "max_train_per_client": 16}}
    make = node_module.run_clients

    def fails(job: Any, down: Any, task: Any) -> Any:
        if int(task.ids) > 1:
            raise Refused("not finite")
        return make(job, down, task)

    monkeypatch.setattr(node_module, "run_clients", fails)
    rogue, everyone = Rogue(secured(tmp_path, "fedavg", SITES, **THREE | cut)), range(4)
    session, download = rogue.begin(1, everyone), rogue.download()
    terms = rogue.terms(1, download, cohort=everyone)
    for c in everyone:
        session.vector(c, terms, download)
    for c in everyone:
        session.count(c)
    assert session.counts(terms) == (4, 2, 0)
    for c in everyone:
        session.open(c)
    assert not session.told
    assert any("2 sites answered from their samples" in reason for reason in rogue.refused)
    honest = {c: vector[-counters_bytes(4) :] for c, vector in session.vectors.items()}
    signed = secure.join_parts({c: vector[:64] for c, vector in session.vectors.items()})
    for made in (honest | {2: honest[0]}, honest | {3: bytes(counters_bytes(4))}, {c: honest[c] for c in (0, 1, 2)}):
        assert session.ask(1, "unmask", signed, secure.join_parts(made), secure.join_parts(session.shown)) is None
    assert session.ask(1, "unmask", signed) is None
