"""Record of the models that a site has replied to, so that a server cannot repeat a round with many crafted models.

Every answer reveals how a model performs on the samples. The difference between the answers to two slightly different
models reveals even more. The same applies to masked answers, because every sum and every counter reveals some
information. A server needs one model per round and kind of message, and needs a different one only after it has lost a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.errors import RunDirError
from fedloom_sites.deploy.protocol.envelope import Envelope, digest_arrays
from fedloom_sites.deploy.secure.opened import read_checked, write_checked
from fedloom_sites.deploy.secure.terms import SessionTerms
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.state import SiteState
from fedloom_sites.deploy.site.trainer import Trainer

MODEL_MESSAGES = ("ask", "train", "score", "analysis")
"""Kinds of messages with models that a site answers individually. Under masks, these kinds are `masked` and `tally`."""
WHOLE_RUN_TEXT = "in the whole run"
"""Key of the entry in the record that counts, for each kind, the models answered in the entire experiment."""


class AskedModelTooOften(RunDirError):
    """Error: the site has already answered the maximum number of models."""


class AskedModels:
    """Models received by a site in an experiment.

    Args:
        site: settings of the site, which include the agreed limit.
        memory: the site's state on disk.
        trainer: the site's run, which defines the number of rounds.
    """

    def __init__(self, site: Site, memory: SiteState, trainer: Trainer) -> None:
        self._site, self._memory, self._trainer = site, memory, trainer
        self._path = memory.folder / "asked.json"

    def enter(self, envelope: Envelope) -> None:
        """Record the models in a message of kind ask, train or score before the site answers it.

        Raises:
            AskedModelTooOften: the message would exceed the number of models that is allowed in a round or in the run.
        """
        self._enter(_model_digests(envelope))

    def enter_masked(self, terms: SessionTerms, accepted: int) -> None:
        """Record the models in a request for a masked vector before the site computes the vector.

        Args:
            terms: terms of the session.
            accepted: round of the state that the site answers with.

        Raises:
            AskedModelTooOften: the request would exceed the number of models that is allowed in a round or in the run.
        """
        models = dict[tuple[str, int], str]()
        if terms.trains:
            models["masked", terms.round] = f"{terms.download} {[accepted]}"
        if terms.question is not None and terms.models:
            models["analysis", terms.round] = f"{digest_arrays([m.encode() for m in terms.models])} {[terms.common]}"
        if terms.scored >= 0:
            models["tally", terms.scored] = f"{digest_arrays([m.encode() for m in terms.models])} {[terms.common]}"
        self._enter(models)

    def _enter(self, models: Mapping[tuple[str, int], str]) -> None:
        record, first = read_checked(self._path) or {}, self._memory.oldest_round()
        total: dict[str, int] = dict(record.pop(WHOLE_RUN_TEXT, {}))
        recent = {key: digests for key, digests in record.items() if int(key.partition(" ")[2]) >= first}
        most, new = self._site.models_per_round, dict[str, list[str]]()
        most_in_run = self._site.models_in_run or 2 * (self._trainer.rounds + 1)
        for (kind, t), digest in models.items():
            digests = recent.get(f"{kind} {t}", [])
            if digest in digests:
                continue
            if len(digests) >= most:
                raise AskedModelTooOften(
                    f"round {t}: the site has already answered {most} models in messages of kind "
                    f"{kind}, which is the limit for one round (`models_per_round`). Restore the "
                    "server's newest checkpoints, or start a new experiment"
                )
            total[kind] = total.get(kind, 0) + 1
            if total[kind] > most_in_run:
                raise AskedModelTooOften(
                    f"round {t}: the site has already answered {most_in_run} models in messages of kind {kind} in this "
                    "experiment, which is the limit (`models_in_run`). Start a new experiment"
                )
            new[f"{kind} {t}"] = [*digests, digest]
        if new:
            write_checked(self._path, recent | new | {WHOLE_RUN_TEXT: total})


def _model_digests(envelope: Envelope) -> dict[tuple[str, int], str]:
    """Return digests of the models in a message and of the requested state, keyed by kind and round."""
    head, arrays = envelope.head, envelope.arrays
    place: list[Any] = [head.get(name) for name in ("accepted", "weight", "global")]
    if head["kind"] == "analysis":  # its terms come first, and most questions read no model
        return {("analysis", head["round"]): f"{digest_arrays(arrays[1:])} {place}"} if arrays[1:] else {}
    if head["kind"] != "train":
        return {(head["kind"], head["round"]): f"{head['digest']} {place}"}
    download = head["digest"] if len(arrays) == 1 else digest_arrays(arrays[:1])
    models = {("train", head["round"]): f"{download} {place[:1]}"}
    if head["scored"] >= 0:
        models["score", head["scored"]] = f"{digest_arrays(arrays[1:])} {place}"
    return models
