"""A site's answers to the server: who it is, what it computed (`trainer`); an error is an answer too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict

from fedloom.data.input_spec import compared
from fedloom.deploy.audit import Audit
from fedloom.deploy.protocol.envelope import ASKED, PROTOCOL, REASON, STEPS, Envelope, Kind, digest_of, seal, unseal
from fedloom.deploy.protocol.identity import sign, signing_key
from fedloom.deploy.secure.member import SessionMember
from fedloom.deploy.secure.protocol import ACCUSES, Broken
from fedloom.deploy.secure.terms import check_models, check_terms, read_terms
from fedloom.deploy.secure.vectors import ScoreVector
from fedloom.deploy.settings import Site
from fedloom.deploy.site.ledger import Spent
from fedloom.deploy.site.local_data import part_sizes
from fedloom.deploy.site.state import Rewound, SiteState
from fedloom.deploy.site.trainer import PLAIN, Trainer, said
from fedloom.engine.chunk import ask_chunk
from fedloom.errors import CheckpointError, Refused, RunDirError, WireError
from fedloom.processes.clients import AskTask, Scores
from fedloom.version import __version__

SENT = "sent.jsonl"
"""Name of the site's own log of what left it, in the folder of its state."""
SAFE = (Spent, Broken, CheckpointError, RunDirError, WireError)
"""Errors whose sentence holds nothing of the samples, whenever they are raised."""


class Client:
    """One site.

    Args:
        site: its settings.

    Attributes:
        trainer: its training and its scores.

    Raises:
        ConfigError: the signing key cannot be read.
    """

    def __init__(self, site: Site) -> None:
        self.site, self._key = site, signing_key(site.signing_key)
        self._memory = SiteState(site.state, site.fingerprint, site.client)
        self.trainer = Trainer(site, self._memory)

    def prepare(self) -> None:
        """Read the data and make the run, before a message asks for it.

        Raises:
            FedloomError: one of them cannot be.
        """
        _ = self.trainer.samples, self.trainer.forms

    def answer(self, message: Message) -> Message:
        """The message with the `reply`."""
        return Message(self.reply(message.content), reply_to=message)

    def reply(self, content: RecordDict) -> RecordDict:
        """The signed reply to the content of any message from the server; a refusal says why.

        It does so only where the reason has no value of a sample and, under differential privacy or secure aggregation,
        where it holds nothing of the samples at all; else the site's own log says it.
        """
        head: dict[str, Any] = {}
        secret = False
        try:
            letter = unseal(content, ASKED, {}, self.site.message_limit)
            head = letter.head
            self._check(letter)
            secret = self.trainer.private or self.site.secure is not None
            with self._memory.open():
                self._watch_samples()
                more, arrays, metrics = self._act(letter)
            more |= {"status": "ok", "reason": "; ".join(self._memory.notes)[:REASON]}
        except Exception as error:  # the server is told, and logs it
            reason = said(error)
            if not isinstance(error, SAFE if secret else PLAIN):
                reason = self.trainer.withheld(reason)
            more, arrays, metrics = {"status": "refused", "reason": reason[:REASON]}, [], None
        self._memory.notes.clear()
        try:
            self._note_sent(head, more, arrays, metrics)
        except CheckpointError as error:  # what cannot be noted does not leave
            more, arrays, metrics = {"status": "refused", "reason": str(error)[:REASON]}, [], None
        return self._signed(head, more, arrays, metrics)

    def _note_sent(
        self, about: dict[str, Any], more: dict[str, Any], arrays: Sequence[bytes], metrics: dict[str, float] | None
    ) -> None:
        """Enter what leaves the site in its own log, before it leaves.

        Raises:
            CheckpointError: the disk is full or refuses.
        """
        facts = {"kind": about.get("kind"), "round": about.get("round"), "status": more["status"]}
        sizes = {"bytes": sum(map(len, arrays)), "numbers": len(metrics or {}), "digest": digest_of(arrays)}
        Audit(self._memory.folder / SENT).write("sent", **facts, **sizes)

    def _signed(
        self, about: dict[str, Any], more: dict[str, Any], arrays: Sequence[bytes], metrics: dict[str, float] | None
    ) -> RecordDict:
        head = {
            "protocol": PROTOCOL,
            "release": __version__,
            "experiment": self.site.fingerprint,
            "kind": about.get("kind", "hello"),
            "round": about.get("round", 0),
            "client": self.site.client,
            "nonce": about.get("nonce", b""),
            "digest": digest_of(arrays),
            **more,
        }
        return seal({**head, "signature": sign(self._key, {**head, "metrics": metrics or {}})}, arrays, metrics)

    def _check(self, letter: Envelope) -> None:
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
        if head["kind"] == "ask" and self.trainer.private:
            raise Refused(f"site {site.site} answers no question: epsilon is limited, and answers have no noise")

        kind, masks = head["kind"], site.secure is not None
        unmasked = kind in ("train", "ask") or (kind == "score" and masks and self.trainer.tallies)
        if (kind in STEPS and not masks) or (unmasked and masks):
            agreed = "secure aggregation" if masks else "no secure aggregation"
            raise Refused(f"site {site.site} answers no message of the kind {kind}: the agreement says {agreed}")
        self._check_round(head)

    def _check_round(self, head: dict[str, Any]) -> None:
        """Refuse rounds that are not agreed on, or that this site has left behind.

        Raises:
            Rewound: the sentence names both.
        """
        kind, t, rounds = head["kind"], head["round"], self.trainer.rounds
        if kind == "hello":
            return
        trains = kind in ("train", "ask", "masked")
        behind, _ = self._memory.accepted()
        if not int(trains) <= t <= rounds:
            raise Rewound(f"round {t} is none of the agreed rounds 1 to {rounds}")
        if t < behind - (not trains):
            raise Rewound(f"round {t} is over: round {behind} was accepted here")

    def _watch_samples(self) -> None:
        """Tell, or refuse where the agreement says so, samples that are not those of the message before.

        Raises:
            Refused: they are others, and they are not to change.
        """
        before = self._memory.changed(self.trainer.samples)
        if before is None:
            return
        what = f"the samples of {self.site.site} are not those that it began with"
        if self.site.fixed_data:
            raise Refused(f"{what}, and fixed_data says that they stay; put the data back, or begin a new experiment")
        self._memory.note_samples(self.trainer.samples)
        if self.trainer.private:
            self.trainer.withheld(what)
        else:
            self._memory.notes.append(f"{what}; the run goes on with the new ones")

    def _act(self, letter: Envelope) -> tuple[dict[str, Any], list[bytes], dict[str, float] | None]:
        kind: Kind = letter.head["kind"]
        torch.set_num_threads(self.site.threads)
        if kind == "hello":
            said = compared(self.trainer.fed.data)
            return said | {"sizes": part_sizes(self.trainer.fed, self.site.client)}, [], None
        if kind in STEPS:
            return {}, [self._step(letter)], None
        samples = {"samples": part_sizes(self.trainer.fed, self.site.client)[0]}
        if kind == "ask":
            task = AskTask(letter.head["round"], self.trainer.ids)
            answer, counts = ask_chunk(self.trainer.job, self.trainer.forms.read_model(letter.arrays[0]), task)
            return samples | {"work": counts[0, :3].tolist()}, [self.trainer.forms.write_answer(answer)], None
        head = letter.head
        alpha = torch.full_like(self.trainer.job.alpha, head["weight"])
        job, state = self.trainer.seated(head["accepted"], replace(self.trainer.job, alpha=alpha))
        if kind == "train":
            found = self.trainer.scores(job, letter.arrays[1:], head["scored"], common=head["global"])
            new = self.trainer.train(job, state, head["round"], letter.arrays[0])
            work = [0, 0, 0] if self.trainer.private else list(new.reply["work"])
            return samples | {"work": work}, [bytes(new.tensors["reply"].numpy())], _plain(found) or None
        found = self.trainer.scores(job, letter.arrays, head["round"], common=head["global"])
        return samples, [], _plain(found)

    def _step(self, letter: Envelope) -> bytes:
        """A step of secure aggregation; the third trains or scores, or both, and masks what came of it."""
        head, arrays = letter.head, letter.arrays
        masking, kind = SessionMember(self.site, self._key, self._memory.folder), head["kind"]
        if kind in ("masked", "tally"):
            return self._masked(letter, masking)
        wanted = 0 if kind == "keys" else 1
        if len(arrays) != wanted:
            raise WireError(f"{len(arrays)} arrays, {wanted} are expected")
        steps: dict[str, Callable[..., bytes]] = {
            "keys": masking.keys, "shares": masking.shares, "open": masking.open, "agree": masking.agree,
            "unmask": masking.tell,
        }  # fmt: skip
        return steps[kind](head["round"], head["session"], *arrays)

    def _masked(self, letter: Envelope, masking: SessionMember) -> bytes:
        """What a site trained, its scores of the models that the letter has, or both, under its masks."""
        head, t, trains, client = letter.head, letter.head["round"], letter.head["kind"] == "masked", self.site.client
        if len(letter.arrays) < 2 + trains:
            raise WireError(f"{len(letter.arrays)} arrays, at least {2 + trains} are expected")
        agreed = self.site.secure
        assert agreed is not None
        download = letter.arrays[0] if trains else None
        message, inbox, *models = letter.arrays[trains:]
        terms, sizes = read_terms(message), part_sizes(self.trainer.fed, client)
        if (terms.round, terms.trains) != (t, trains):
            raise Broken(f"the terms are of round {terms.round}, the message is of round {t}")
        check_terms(terms, client, sizes, self.site.clients)
        check_models(terms, download, models)
        accusations = masking.receive(t, head["session"], inbox, terms)
        if accusations:
            return ACCUSES + accusations
        job, state = self.trainer.seated(head["accepted"], terms.weighed(self.trainer.job, self.site.samples))
        vectors = []
        if terms.scored >= 0:
            found = self.trainer.scores(job, models, terms.scored, common=terms.common)
            if self.trainer.tallies:
                vectors.append(ScoreVector(job).encode(found, sizes, terms.parts(agreed.threshold)))
        if trains:
            if job.kept_fields and (0 if state is None else state.round) != head["accepted"]:
                raise Broken(
                    f"the row that the server's sum has of site {self.site.site} is not on this disk any more, so its "
                    "change is unknown; the site cannot take part in this run again"
                )
            weights = terms.share(job, client), float(job.masses[client])
            new = self.trainer.train(job, state, t, letter.arrays[0], weights)
            vectors.insert(0, new.tensors["reply"].numpy().view(np.uint64))
        return masking.masked(t, head["session"], np.concatenate([np.zeros(0, np.uint64), *vectors]))


def _plain(scores: Scores) -> dict[str, float]:
    """Scores as the metrics of a message."""
    values = {f"{m}/{p}/{name}": float(v[0]) for (m, p), found in scores.items() for name, v in found.items()}
    return {key: value for key, value in values.items() if value == value}
