"""Masking: a site's side of secure aggregation, and what both sides know of its vectors.

A site keeps the secrets of one session, the newest, on its own disk, in a folder that only it reads, and forgets them
with the answer of the last step. A message that comes again gets the same answer; another one in its place is refused,
since two vectors under one mask tell their difference. So is a second sum of a round over other sites, which would
tell the difference between the two.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedloom.algorithms import upload_fields
from fedloom.deploy.exchange import secure
from fedloom.deploy.exchange.identity import verifying_key
from fedloom.deploy.exchange.secure import Broken, Integers
from fedloom.deploy.settings import Site
from fedloom.engine.chunk import Made
from fedloom.engine.job import Job
from fedloom.engine.setting import Setting
from fedloom.engine.uploads import Kept, fields_of
from fedloom.errors import Refused, WireError
from fedloom.rows.aggregate import PrivateMean
from fedloom.storage.files import make_folder, write_atomic

WORK = 3
"""Counts of work at the end of a vector."""


def check_maskable(setting: Setting) -> None:
    """Refuse a run whose server needs single uploads.

    Raises:
        Refused: what needs them.
    """
    setting = setting.resolved()
    name, fields = type(setting.method).__name__, upload_fields(type(setting.method))
    single = [field for field, kind in fields.items() if not kind.averaged]
    why = ""
    if single:
        why = f"{name} gives its server the rows of single clients (of {', '.join(single)})"
    elif setting.method.mixes:
        why = f"{name} mixes the kept rows of single clients into its downloads"
    elif isinstance(setting.aggregator, PrivateMean):
        why = "aggregator 'private-mean' clips single uploads; its noise is not shared among the sites yet"
    elif setting.aggregator is not None and not setting.aggregator.linear:
        why = f"aggregator {type(setting.aggregator).__name__} compares single uploads"
    elif setting.weigher.probes:
        why = f"weigher {setting.weigher.kind!r} asks single clients"
    elif setting.sampler.probes or setting.sampler.learns:
        why = f"sampler {setting.sampler.kind!r} looks at single clients"
    if why:
        raise Refused(f"{why}, but under secure aggregation the server sees sums only; choose another, or leave it out")


class Vectors:
    """What goes into a masked vector: the fields of an upload side by side, and counts of work.

    Args:
        job: the run.
        idle: an upload ``[1, .]``, for the widths.
    """

    def __init__(self, job: Job, idle: Any) -> None:
        self._job, self._fields = job, fields_of(job)
        self._whole = {name: getattr(idle, name).shape[1] for name in self._fields}
        masks = job.messages.masks
        self._widths = {n: int(masks[n].sum()) if n in masks else width for n, width in self._whole.items()}
        self.length = sum(self._widths.values()) + WORK

    def encode(
        self, made: Made, share: float, before: dict[str, Tensor] | None
    ) -> tuple[Integers, dict[str, Tensor], int]:
        """A site's vector, the rows that the server's sum has of it from then on, and how many numbers were clipped.

        Args:
            made: what the site made.
            share: in the mean, 0 to 1.
            before: the rows that the sum has of it now, as integers; None: those before a first upload.

        Raises:
            Broken: a number is not finite.
        """
        parts, rows, clipped = [], dict[str, Tensor](), 0
        old = self.first() if before is None else before
        for name, field in self._fields.items():
            if isinstance(field, Kept):
                steps, cut = secure.encode(self._some(name, field.weighted(made.up)[0]))
                rows[name] = torch.from_numpy(steps.view(np.int64))
                parts.append(steps - old[name].numpy().view(np.uint64))
            else:
                weight = torch.full((1, 1), share, dtype=torch.float64)
                up = made.up._replace(**{name: getattr(made.up, name).double()})
                steps, cut = secure.encode(self._some(name, field.partial(up, None, weight)))
                parts.append(steps)
            clipped += cut
        return np.concatenate([*parts, made.work[0].numpy().view(np.uint64)]), rows, clipped

    def first(self) -> dict[str, Tensor]:
        """What the server's sum has of a client before its first upload, as integers."""
        template, found = self._job.kept.template, dict[str, Tensor]()
        for name, field in self._fields.items():
            if isinstance(field, Kept):
                rows = type(template)(*[f[None] for f in template])
                steps, _ = secure.encode(self._some(name, field.weighted(rows)[0]))
                found[name] = torch.from_numpy(steps.view(np.int64))
        return found

    def decode(self, total: Integers, count: int, scale: float) -> tuple[dict[str, Tensor], Tensor]:
        """The sums of ``count`` sites by field, float64 ``[d]``, and of their work ``[3]``.

        Args:
            total: without masks.
            count: sites in it.
            scale: what shares were divided by.

        Raises:
            Broken: it is out of range.
        """
        values = torch.from_numpy(secure.decode(total, count))
        work = torch.from_numpy(total[-WORK:].view(np.int64).copy())
        if bool((work < 0).any()):
            raise Broken("the sum of work is below zero: a mask is still on it")
        sums = {}
        for (name, field), value in zip(
            self._fields.items(), values[:-WORK].split([*self._widths.values()]), strict=True
        ):
            if not isinstance(field, Kept) and not field.kind.accumulates:
                value = value * scale
            mask = self._job.messages.masks.get(name)
            if mask is not None:
                value = torch.zeros(self._whole[name], dtype=torch.float64).masked_scatter(mask.cpu(), value)
            sums[name] = value
        return sums, work

    def _some(self, name: str, value: Tensor) -> np.ndarray[Any, Any]:
        """The coordinates of a field that travel."""
        masks = self._job.messages.masks
        found: np.ndarray[Any, Any] = (value[masks[name]] if name in masks else value).detach().cpu().double().numpy()
        return found


class Masking:
    """A site in a session.

    Args:
        site: its settings, with secure aggregation.
        key: its signing key.
        folder: of its state in this experiment.
    """

    def __init__(self, site: Site, key: Ed25519PrivateKey, folder: Path) -> None:
        assert site.secure is not None
        self._agreed, self._client, self._key, self._folder = site.secure, site.client, key, folder
        self._agreement = site.secure.digest(site.fingerprint)
        self._public = {c: verifying_key(line, f"client {c}") for c, line in enumerate(site.secure.keys)}

    def keys(self, round: int, nonce: bytes) -> bytes:
        """Step 1: this site's keys in a new session, which takes the place of the one before."""
        name = secure.session_name(self._agreement, round, nonce)
        known = self._load()
        if name.hex() in known["past"]:
            raise Broken("this session is over")
        if known.get("name") != name.hex():
            secrets = secure.new_secrets()
            advert = secure.write_adverts([secure.advertise(name, self._client, secrets, self._key)])
            past = [*known["past"], *([known["name"]] if "name" in known else [])]
            known = {"name": name.hex(), "round": round, "past": past, "revealed": known["revealed"]}
            known |= {"secrets": [part.hex() for part in secrets], "advert": advert.hex()}
            self._save(known)
        return bytes.fromhex(known["advert"])

    def shares(self, round: int, nonce: bytes, message: bytes) -> bytes:
        """Step 2: shares of this site's secrets, sealed for every other site of those that advertised."""
        known = self._session(round, nonce)
        self._once(known, "adverts", message.hex())
        if "shares" not in known:
            session, secrets = self._agreed_by(known, message), _secrets(known)
            made = secure.share(session, self._client, secrets)
            known["own"] = made.pop(self._client).hex()
            known["shares"] = secure.write(made).hex()
            self._save(known)
        return bytes.fromhex(known["shares"])

    def receive(self, round: int, nonce: bytes, message: bytes, asked: str) -> None:
        """Step 3, first half: the shares of the others, whom this site will have masks with.

        Args:
            round: of the run.
            nonce: of the session.
            message: sealed shares by sender.
            asked: digest of what the site is to upload.
        """
        known = self._session(round, nonce, "shares")
        self._once(known, "inbox", message.hex())
        self._once(known, "asked", asked)
        if "held" not in known:
            session, secrets = self._agreed_by(known), _secrets(known)
            sealed = _read(message, secure.SEALED)
            if not set(sealed) <= set(session.adverts) - {self._client}:
                raise Broken("shares came of sites that did not advertise")
            if len(sealed) + 1 < session.threshold:
                raise Broken(f"{len(sealed) + 1} sites sent shares, {session.threshold} are needed")
            held = {c: secure.open_share(session, self._client, secrets, c, part) for c, part in sealed.items()}
            known["held"] = {str(c): part.hex() for c, part in held.items()} | {str(self._client): known["own"]}
            self._save(known)

    def masked(self, round: int, nonce: bytes, vector: Integers) -> bytes:
        """Step 3, second half: this site's vector under its masks."""
        known = self._session(round, nonce, "held")
        self._once(known, "vector", hashlib.sha256(vector.tobytes()).hexdigest())
        self._save(known)
        peers = [int(c) for c in known["held"]]
        sent = secure.masked(self._agreed_by(known), self._client, _secrets(known), peers, vector)
        return sent.astype("<u8", copy=False).tobytes()

    def tell(self, round: int, nonce: bytes, message: bytes) -> bytes:
        """Step 4: shares of the seeds of the sites whose vector arrived, of the masking keys of the others."""
        known = self._session(round, nonce)
        if "told" not in known:
            self._session(round, nonce, "vector")
            survivors, held = set(_read(message, 0)), {int(c): bytes.fromhex(p) for c, p in known["held"].items()}
            if self._client not in survivors or not survivors <= set(held):
                raise Broken("the sites whose vector arrived are not among those that shared, or this one is missing")
            if len(survivors) < self._agreed.threshold:
                raise Broken(f"the sum is of {len(survivors)} sites, it must be of {self._agreed.threshold} or more")
            before = known["revealed"].setdefault(str(round), message.hex())
            if before != message.hex():
                raise Broken(f"a sum of round {round} was told already, of other sites; the two tell their difference")
            told = secure.write(secure.tell(held, survivors)).hex()
            kept = {k: known[k] for k in ("name", "round", "past", "revealed")}
            known = {**kept, "told": told, "survivors": message.hex()}  # all secrets are gone
            self._save(known)
        self._once(known, "survivors", message.hex())
        return bytes.fromhex(known["told"])

    # ---------------------------------------------------------------------------------------------------- inside

    def _session(self, round: int, nonce: bytes, step: str = "name") -> dict[str, Any]:
        """What is known of the session, which must have come to a step."""
        known = self._load()
        if known.get("name") != secure.session_name(self._agreement, round, nonce).hex() or step not in known:
            raise Broken("the session is another one, is over, or has not come to this step")
        return known

    def _once(self, known: dict[str, Any], name: str, value: str) -> None:
        """Whatever was said once in a session stays."""
        if known.setdefault(name, value) != value:
            raise Broken(f"the {name} of a session cannot change")

    def _agreed_by(self, known: dict[str, Any], message: bytes | None = None) -> secure.Session:
        """The session, of those that advertised; checked when they are heard of for the first time."""
        adverts = _adverts(bytes.fromhex(known["adverts"]) if message is None else message)
        name = bytes.fromhex(known["name"])
        if message is not None:
            secure.check_adverts(name, adverts, self._public)
            if bytes.fromhex(known["advert"]) not in [secure.write_adverts([a]) for a in adverts]:
                raise Broken("this site's own keys are missing or are not those that it advertised")
            if len(adverts) < self._agreed.threshold:
                raise Broken(f"{len(adverts)} sites advertised keys, {self._agreed.threshold} are needed")
        return secure.session_of(name, self._agreed.threshold, adverts)

    @property
    def _path(self) -> Path:
        return self._folder / "session" / "session.json"

    def _load(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {"past": [], "revealed": {}}
        except (OSError, ValueError) as error:
            raise Broken("the file of the site's session is damaged; this experiment cannot go on here") from error
        return found

    def _save(self, known: dict[str, Any]) -> None:
        make_folder(self._folder)
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(self._path, json.dumps(known).encode())


def _secrets(known: dict[str, Any]) -> secure.Secrets:
    return secure.Secrets(*map(bytes.fromhex, known["secrets"]))


def _read(message: bytes, width: int) -> dict[int, bytes]:
    try:
        return secure.read(message, width)
    except WireError as error:
        raise Broken(str(error)) from None


def _adverts(message: bytes) -> list[secure.Advert]:
    try:
        return secure.read_adverts(message)
    except WireError as error:
        raise Broken(str(error)) from None
