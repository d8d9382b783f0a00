"""Asked: the models that a site has answered on its own, so that a round is not asked again with many crafted ones.

An answer shows what the samples make of a model, and the difference of answers to models that differ a little shows
more. A server needs one model for a round and a kind of message, and another one only where it lost a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.deploy.protocol.envelope import Envelope, digest_of
from fedloom.deploy.secure.opened import read_checked, write_checked
from fedloom.errors import RunDirError

KINDS = ("ask", "train", "score")
"""Kinds of messages with models."""
MOST = 3
"""Most models of a round and a kind that are answered; the same model again is none more."""


class AskedTooOften(RunDirError):
    """A message with one model more than a site answers; the sentence holds nothing of the samples."""


class AskedModels:
    """The models of one site in one experiment.

    Args:
        folder: of its state in this experiment.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "asked.json"

    def enter(self, envelope: Envelope, first: int) -> None:
        """Enter the models of a message before it is answered.

        Args:
            envelope: of the kind ask, train or score.
            first: the oldest round that is still answered; what was asked before is forgotten.

        Raises:
            AskedTooOften: a round's models are too many.
        """
        record = read_checked(self._path) or {}
        recent = {key: digests for key, digests in record.items() if int(key.partition(" ")[2]) >= first}
        new = dict[str, list[str]]()
        for (kind, t), digest in _models(envelope).items():
            digests = recent.get(f"{kind} {t}", [])
            if digest in digests:
                continue
            if len(digests) == MOST:
                raise AskedTooOften(
                    f"round {t}: {MOST} models were answered to messages of the kind {kind}, and a site answers no "
                    "more of a round; put the server's newest checkpoints back, or begin a new experiment"
                )
            new[f"{kind} {t}"] = [*digests, digest]
        if new:
            write_checked(self._path, recent | new)


def _models(envelope: Envelope) -> dict[tuple[str, int], str]:
    """Digest of the models of a message, with the state that it is asked for, by kind and round."""
    head, arrays = envelope.head, envelope.arrays
    place: list[Any] = [head.get(name) for name in ("accepted", "weight", "global")]
    if head["kind"] != "train":
        return {(head["kind"], head["round"]): f"{head['digest']} {place}"}
    download = head["digest"] if len(arrays) == 1 else digest_of(arrays[:1])
    models = {("train", head["round"]): f"{download} {place[:1]}"}
    if head["scored"] >= 0:
        models["score", head["scored"]] = f"{digest_of(arrays[1:])} {place}"
    return models
