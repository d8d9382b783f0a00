"""A site's answers to the server: who it is, its training, its scores; an error is an answer too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedloom.data import Federation
from fedloom.deploy.code import read_agreed
from fedloom.deploy.exchange.envelope import ASKED, PROTOCOL, REASON, STEPS, Kind, Letter, digest_of, seal, unseal
from fedloom.deploy.exchange.forms import Forms
from fedloom.deploy.exchange.identity import sign, signing_key
from fedloom.deploy.exchange.replies import lengths
from fedloom.deploy.exchange.secure import Broken
from fedloom.deploy.noise import SharedMean, released
from fedloom.deploy.settings import Site, check_version
from fedloom.deploy.site.ledger import Ledger, Spent
from fedloom.deploy.site.local_data import part_sizes, samples_digest, schema_of, site_federation
from fedloom.deploy.site.masking import Masking, check_maskable
from fedloom.deploy.site.state import Generation, Memory
from fedloom.deploy.site.vectors import Figures, Uploads
from fedloom.engine.chunk import Made, ask, make, usable
from fedloom.engine.job import Job
from fedloom.engine.privacy import Noise, accounted
from fedloom.engine.records import Scores
from fedloom.engine.scoring import hybrid_scores, personal_models, score
from fedloom.engine.setup import make_job
from fedloom.errors import CheckpointError, FedloomError, Refused, RunDirError, WireError
from fedloom.experiment import Experiment
from fedloom.processes.chunks import AskTask, ScoreTask, TrainTask
from fedloom.version import __version__

SAFE = (Spent, Broken, CheckpointError, RunDirError, WireError)
"""Errors whose sentence holds nothing of the samples, whenever they are raised."""


class Client:
    """One site.

    Args:
        site: its settings.

    Raises:
        ConfigError: the signing key cannot be read.
    """

    def __init__(self, site: Site) -> None:
        self.site, self._key = site, signing_key(site.signing_key)
        self._memory = Memory(site.state, site.fingerprint, site.client)

    def prepare(self) -> None:
        """Read the data and make the run, before a message asks for it.

        Raises:
            FedloomError: one of them cannot be.
        """
        _ = self.samples, self.forms

    def answer(self, message: Message) -> Message:
        """The message with the `reply`."""
        return Message(self.reply(message.content), reply_to=message)

    def reply(self, content: RecordDict) -> RecordDict:
        """The signed reply to the content of any message from the server; a refusal says why.

        Under differential privacy it says so only where the reason holds nothing of the samples.
        """
        head: dict[str, Any] = {}
        secret = False
        try:
            letter = unseal(content, ASKED, {}, self.site.message_limit)
            head = letter.head
            self._check(letter)
            secret = self._private or self.site.secure is not None
            with self._memory.open():
                self._watch_samples()
                more, arrays, metrics = self._act(letter)
            more |= {"status": "ok", "reason": "; ".join(self._memory.notes)[:REASON]}
        except Exception as error:  # the server is told, and logs it
            known = isinstance(error, FedloomError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            if secret and not isinstance(error, SAFE):
                reason = self._withheld(reason)
            more, arrays, metrics = {"status": "refused", "reason": reason[:REASON]}, [], None
        self._memory.notes.clear()
        return self._signed(head, more, arrays, metrics)

    def _signed(
        self, asked: dict[str, Any], more: dict[str, Any], arrays: Sequence[bytes], metrics: dict[str, float] | None
    ) -> RecordDict:
        head = {
            "protocol": PROTOCOL,
            "release": __version__,
            "experiment": self.site.fingerprint,
            "kind": asked.get("kind", "hello"),
            "round": asked.get("round", 0),
            "client": self.site.client,
            "nonce": asked.get("nonce", b""),
            "digest": digest_of(arrays),
            **more,
        }
        return seal({**head, "signature": sign(self._key, {**head, "metrics": metrics or {}})}, arrays, metrics)

    def _check(self, letter: Letter) -> None:
        """Refuse another release or experiment, and what did not arrive as it was sent.

        Raises:
            Refused: both sides are named.
        """
        head, site = letter.head, self.site
        for what, got, mine in (
            ("fedloom", head["release"], __version__),
            ("protocol", head["protocol"], PROTOCOL),
            ("experiment", head["experiment"][:16], site.fingerprint[:16]),
        ):
            if got != mine:
                raise Refused(f"the server's {what} is {str(got)[:60]}, that of site {site.site} is {mine}")
        if head["client"] not in (-1, site.client):
            raise Refused(f"the message is for client {head['client']}, site {site.site} is client {site.client}")
        if head["digest"] != digest_of(letter.arrays):
            raise Refused("the arrays did not arrive as they were sent")
        if head["kind"] == "ask" and self._private:
            raise Refused(f"site {site.site} answers no question: the experiment has a delta, and answers no noise")

        kind, masks = head["kind"], site.secure is not None
        unmasked = kind in ("train", "ask") or (kind == "score" and masks and self._tallies)
        if (kind in STEPS and not masks) or (unmasked and masks):
            agreed = "secure aggregation" if masks else "no secure aggregation"
            raise Refused(f"site {site.site} answers no message of the kind {kind}: the agreement says {agreed}")

    def _withheld(self, reason: str) -> str:
        """The sentence for the server in the place of one that may tell of the samples; that goes to the site's log."""
        sys.stderr.write(f"fedloom: site {self.site.site}: {reason}\n")
        return f"site {self.site.site} could not answer; its own log says why"

    def _watch_samples(self) -> None:
        """Tell, or refuse where the agreement says so, samples that are not those of the message before.

        Raises:
            Refused: they are others, and they are not to change.
        """
        before = self._memory.changed(self.samples)
        if before is None:
            return
        what = f"the samples of {self.site.site} are not those that it began with"
        if self.site.fixed_data:
            raise Refused(f"{what}, and fixed_data says that they stay; put the data back, or begin a new experiment")
        self._memory.note_samples(self.samples)
        if self._private:
            self._withheld(what)
        else:
            self._memory.notes.append(f"{what}; the run goes on with the new ones")

    def _act(self, letter: Letter) -> tuple[dict[str, Any], list[bytes], dict[str, float] | None]:
        kind: Kind = letter.head["kind"]
        torch.set_num_threads(self.site.threads)
        if kind == "hello":
            said = schema_of(self.fed.data).model_dump(mode="json")
            return said | {"sizes": part_sizes(self.fed, self.site.client)}, [], None
        if kind in STEPS:
            return {}, [self._step(letter)], None
        samples = {"samples": part_sizes(self.fed, self.site.client)[0]}
        if kind == "ask":
            task = AskTask(letter.head["round"], self._ids)
            answer, counts = ask(self.job, self.forms.read_model(letter.arrays[0]), task)
            return samples | {"work": counts[0, :3].tolist()}, [self.forms.write_answer(answer)], None
        job, state = self._seated(letter)
        if kind == "train":
            asked = letter._replace(arrays=letter.arrays[1:])
            model, found = self._score_first(job, asked, letter.head["scored"])
            new = self._train(job, state, letter)
            work = [0, 0, 0] if self._private else list(new.reply["work"])
            return (
                {**samples, "work": work, "model": model},
                [bytes(new.tensors["reply"].numpy())],
                _plain(found) or None,
            )
        model, found = self._score(job, letter)
        return {**samples, "model": model}, [], _plain(found)

    # ---------------------------------------------------------------------------------------------------- inside

    @cached_property
    def fed(self) -> Federation:
        """The site's samples, as one client of the federation."""
        return site_federation(self._experiment, self.site)

    @cached_property
    def _experiment(self) -> Experiment:
        check_version(self.site)
        found = read_agreed(self.site, chunk=1, workers=1)
        if self.site.secure is not None:
            check_maskable(found.methods[0].setting)
        return found

    @cached_property
    def _private(self) -> bool:
        """Whether a delta is in force, at the sites or at the server: nothing leaves that epsilon does not cover."""
        setting = self._experiment.methods[0].setting
        return accounted(setting.channel, setting.aggregator) is not None

    @cached_property
    def samples(self) -> str:
        """Digest of the samples; it does not leave the site."""
        return samples_digest(self.fed, self.site.client)

    @cached_property
    def _run(self) -> tuple[Job, Any]:
        job, server = make_job(self._experiment.methods[0].setting, self.fed)
        survivors = None if self.site.secure is None else self.site.secure.threshold
        setting = job.setting.with_(
            channel=released(job.setting.channel), aggregator=released(job.setting.aggregator, survivors)
        )
        return replace(job, setting=setting), server

    @property
    def job(self) -> Job:
        """The run as this site knows it."""
        return self._run[0]

    @cached_property
    def forms(self) -> Forms:
        """How its messages are written."""
        return Forms(*self._run, self.site.client)

    @property
    def _noise(self) -> Noise | None:
        """What this site's epsilon is of: its own noise; noise that the server adds does not protect it from that."""
        setting = self.job.setting
        return accounted(setting.channel, setting.aggregator if isinstance(setting.aggregator, SharedMean) else None)

    @property
    def _ids(self) -> Tensor:
        return torch.tensor([self.site.client])

    def _seated(self, letter: Letter) -> tuple[Job, Generation | None]:
        """The run with this site's share and the state that the server names as accepted."""
        job, ids = self.job, self._ids
        alpha = torch.full_like(job.alpha, letter.head["weight"])
        state = self._memory.settle(letter.head["accepted"])
        for name, store in (("rows", job.clients), ("residue", job.residue), ("optimizer", job.optimizer)):
            store.reset()
            if state is not None:
                found = state.group(name)
                store.write(ids, type(store.template)(*[found[f][None] for f in store.template._fields]))
        return replace(job, alpha=alpha), state

    def _step(self, letter: Letter) -> bytes:
        """A step of secure aggregation; the third trains or scores, or both, and masks what came of it."""
        head, arrays = letter.head, letter.arrays
        masking, t, nonce = Masking(self.site, self._key, self._memory.folder), head["round"], head["session"]
        if head["kind"] in ("masked", "tally"):
            return self._masked(letter, masking)
        wanted = 0 if head["kind"] == "keys" else 1
        if len(arrays) != wanted:
            raise WireError(f"{len(arrays)} arrays, {wanted} are expected")
        if head["kind"] == "keys":
            return masking.keys(t, nonce)
        return (masking.shares if head["kind"] == "shares" else masking.tell)(t, nonce, arrays[0])

    def _masked(self, letter: Letter, masking: Masking) -> bytes:
        """What a site trained, its scores of the models that the letter has, or both, under its masks."""
        head, t, trains = letter.head, letter.head["round"], letter.head["kind"] == "masked"
        if len(letter.arrays) < 1 + trains:
            raise WireError(f"{len(letter.arrays)} arrays, at least {1 + trains} are expected")
        if trains and not abs(head["share"]) <= 1:
            raise Broken(f"a share must be within -1..1, got {head['share']}")
        inbox, *models = letter.arrays[trains:]
        scored = head["scored"] if trains else t
        asked = f"{head['accepted']} {head['weight']} {_asked(letter) if trains else ''} {scored} {head['global']}"
        asked += f" {head['parts']} {digest_of(models)}"
        sums = {"scores": scored, **({"uploads": t} if trains else {})}
        masking.receive(t, head["session"], inbox, asked, sums)
        job, state = self._seated(letter)
        vectors = []
        if scored >= 0:
            found = self._score_first(job, letter._replace(arrays=models), scored)[1]
            if self._tallies:
                sizes = part_sizes(self.fed, self.site.client)
                vectors.append(Figures(job).encode(found, sizes, head["parts"]))
        if trains:
            if job.kept_fields and (0 if state is None else state.round) != head["accepted"]:
                raise Broken(
                    f"the row that the server's sum has of site {self.site.site} is not on this disk any more, so its "
                    "change is unknown; the site cannot take part in this run again"
                )
            vectors.insert(0, self._train(job, state, letter).tensors["reply"].numpy().view(np.uint64))
        return masking.masked(t, head["session"], np.concatenate([np.zeros(0, np.uint64), *vectors]))

    def _sent(
        self, job: Job, state: Generation | None, made: Made, down: Any, share: float | None
    ) -> dict[str, Tensor]:
        """What is sent of a round, and what is kept for the change of the next one under secure aggregation.

        Raises:
            Refused: under secure aggregation, what the server would reject.
        """
        if share is None:
            return {"reply": torch.frombuffer(bytearray(self.forms.write_up(made)), dtype=torch.uint8)}
        assert self.site.secure is not None
        bound = self.site.secure.norm_bound
        if not isinstance(job.setting.aggregator, SharedMean):  # which clips, and a refusal would be an answer
            if bound is not None and float(lengths(job, made.up, down)) > bound:
                raise Refused(
                    f"the difference is {float(lengths(job, made.up, down)):.4g} long, at most {bound:.4g} is agreed"
                )
            if not bool(usable((*made.up, *made.new), 1, job.setting.engine.norm_bound, job.weights(made.up)).all()):
                raise Refused("the upload is not finite, longer than engine.norm_bound, or has a weight below zero")
        made = made._replace(work=torch.zeros_like(made.work)) if self._private else made
        vector, rows, clipped = Uploads(job, self.forms.idle).encode(
            made, share, None if state is None else state.group("kept")
        )
        if clipped:
            self._withheld(f"{clipped} numbers of the upload are out of range and were clipped")
        return {"reply": torch.from_numpy(vector.view(np.int64)), **{f"kept.{n}": row for n, row in rows.items()}}

    def _train(self, job: Job, state: Generation | None, letter: Letter) -> Generation:
        """A round of training; one that was asked for before is answered with what is kept.

        Raises:
            FedloomError: the privacy budget is spent; or, without accounted noise of the site's own, the training
                failed or its result is not finite.
        """
        t, base, digest = letter.head["round"], 0 if state is None else state.round, _asked(letter)
        kept = self._memory.answered(t, base, digest)
        if kept is not None:
            return kept
        down = self.forms.read_down(letter.arrays[0])
        ledger = Ledger(self._memory.folder, self._noise, self.site.epsilon, f"site {self.site.site}")
        ledger.release(t, samples=self.samples)
        made = self._made(job, down, t)
        tensors = {f"rows.{name}": value[0] for name, value in made.new._asdict().items()}
        for group, values in (("residue", made.residue), ("optimizer", made.optimizer)):
            tensors |= {f"{group}.{n}": v[0] for n, v in (values._asdict() if values else {}).items()}
        tensors |= self._sent(job, state, made, down, letter.head.get("share"))
        new = Generation(t, base, digest, tensors, {"work": made.work[0].tolist()})
        self._memory.keep(new)
        return new

    def _made(self, job: Job, down: Any, t: int) -> Made:
        """What a round makes; under accounted noise of the site's own, whether the training worked is no answer either.

        Then noise alone is sent, and the state stays as it was.
        """
        try:
            made = make(job, down, TrainTask(t, torch.tensor([0]), self._ids, torch.ones(1, 1)))
            if not bool(usable((*made.up, *made.new), 1, None).all()):
                raise Refused(f"round {t}: the result of the training is not finite")
        except FedloomError as error:
            if self._noise is None:
                raise
            self._withheld(str(error))
            return self._noise_alone(job)
        return made

    def _noise_alone(self, job: Job) -> Made:
        up, ids = self.forms.idle, self._ids
        if accounted(job.setting.channel) is not None:
            assert job.setting.channel is not None
            sent, _ = job.setting.channel.apply(None, torch.zeros_like(job.messages.update(up)), ())
            up = job.messages.with_update(up, sent)
        rows, residue, optimizer = (s.read(ids) for s in (job.clients, job.residue, job.optimizer))
        return Made(up, None, None, None, rows, residue, torch.zeros(1, 3).long(), optimizer)

    def _score_first(self, job: Job, letter: Letter, t: int) -> tuple[str, Scores]:
        """The scores of round ``t`` that are asked for with a training; it goes on where they cannot be found."""
        if t < 0:
            return "", {}
        try:
            return self._score(job, letter._replace(head={**letter.head, "round": t}))
        except FedloomError as error:
            what = f"round {t} cannot be scored: {error}"
            if self._private or self.site.secure is not None:
                self._withheld(what)
            else:
                self._memory.notes.append(what)
            return "", {}

    def _score(self, job: Job, letter: Letter) -> tuple[str, Scores]:
        """Keep the newest model, and score every model on the site's own parts."""
        t, ids = letter.head["round"], self._ids
        down, shared = self.forms.read_models(letter.arrays, global_there=letter.head["global"])
        everyone = None if down is None else _for_all(down, job.n)
        there = bool(part_sizes(self.fed, self.site.client)[0])
        personal = there and down is not None
        if personal or shared is not None:
            row = personal_models(job, everyone, t, ids)[0] if personal else shared
            assert row is not None
            kind = "personal" if personal else "global"
            self._memory.keep_model(row.cpu(), job.oracle.layout.header(), t, kind)
        else:
            kind = ""
        silent = not (self._scores_openly or self._tallies) or self.site.epsilon is not None  # scores have no noise
        if not there or silent:
            return kind, {}
        found: Scores = score(job, everyone, shared, ScoreTask(t, ids, ids, common=False))
        part = job.setting.evaluate.select_on
        both = self._tallies and {("global", part), ("personal", part)} <= set(found)
        return kind, found | hybrid_scores(found, part) if both else found

    @property
    def _scores_openly(self) -> bool:
        """Whether the site's own scores may leave it."""
        agreed = self.site.secure
        return not self._private and (agreed is None or agreed.scores == "per-site")

    @property
    def _tallies(self) -> bool:
        """Whether the site's scores are summed under masks."""
        return not self._private and self.site.secure is not None and self.site.secure.scores == "masked"


def _plain(scores: Scores) -> dict[str, float]:
    """Scores as the metrics of a message."""
    values = {f"{m}/{p}/{name}": float(v[0]) for (m, p), found in scores.items() for name, v in found.items()}
    return {key: value for key, value in values.items() if value == value}


def _asked(letter: Letter) -> str:
    """Digest of what a site is to do in a round: the download and, under secure aggregation, its share."""
    share = [repr(letter.head["share"]).encode()] if "share" in letter.head else []
    return digest_of([*letter.arrays[:1], *share])


def _for_all(down: Any, n: int) -> Any:
    """A download of one client in the place of every client's, which is how `score` finds it by the client's number."""
    return type(down)(*[f.expand(n, -1) if f.dim() > 1 else f for f in down])
