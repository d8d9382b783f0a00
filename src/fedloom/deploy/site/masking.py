"""Masking: a site's side of secure aggregation.

A site keeps the secrets of one session, the newest, on its own disk, in a folder that only it reads, and forgets them
with the answer of the last step. A message that comes again gets the same answer; another one in its place is refused,
since two vectors under one mask tell their difference. So is a second sum of a round, or of its scores, over other
sites, which would tell the difference between the two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.algorithms import upload_fields
from fedloom.deploy.exchange import secure
from fedloom.deploy.exchange.identity import verifying_key
from fedloom.deploy.exchange.secure import MOST, Broken, Integers
from fedloom.deploy.noise import FINEST, released
from fedloom.deploy.settings import Site
from fedloom.engine.setting import Setting
from fedloom.errors import Refused, WireError
from fedloom.rows.aggregate import PrivateMean
from fedloom.storage.files import make_folder, write_atomic

REMEMBERED = 64
"""Newest sums that a site remembers; it has no part in one of an older round."""


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
    elif not isinstance(setting.aggregator, PrivateMean | None) and not setting.aggregator.linear:
        why = f"aggregator {type(setting.aggregator).__name__} compares single uploads"
    elif setting.weigher.probes:
        why = f"weigher {setting.weigher.kind!r} asks single clients"
    elif setting.sampler.probes or setting.sampler.learns:
        why = f"sampler {setting.sampler.kind!r} looks at single clients"
    elif isinstance(setting.aggregator, PrivateMean) and 0 < released(setting.aggregator, MOST).scale < FINEST:
        why = f"aggregator 'private-mean' with sigma {setting.aggregator.sigma:g} has too little noise to be shared"
    if why:
        raise Refused(f"{why}, but under secure aggregation the server sees sums only; choose another, or leave it out")


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
            past = [*known["past"], *([known["name"]] if "name" in known else [])][-REMEMBERED:]
            known = {k: known[k] for k in ("revealed", "forgotten")} | {"name": name.hex(), "past": past}
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

    def receive(self, round: int, nonce: bytes, message: bytes, asked: str, sums: Mapping[str, int]) -> None:
        """Step 3, first half: the shares of the others, whom this site will have masks with.

        Args:
            round: of the run.
            nonce: of the session.
            message: sealed shares by sender.
            asked: digest of what the site is to mask.
            sums: the round of what will be summed, by what that is.
        """
        known = self._session(round, nonce, "shares")
        self._once(known, "inbox", message.hex())
        self._once(known, "asked", asked)
        self._once(known, "sums", {what: t for what, t in sums.items() if t >= 0})
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
            self._reveal(known, hashlib.sha256(message).hexdigest())
            told = secure.write(secure.tell(held, survivors)).hex()
            kept = {k: known[k] for k in ("name", "past", "revealed", "forgotten")}
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

    def _reveal(self, known: dict[str, Any], survivors: str) -> None:
        """Note the sites of a sum; it is of one set of sites, whatever comes."""
        for what, t in known["sums"].items():
            revealed: dict[str, str] = known["revealed"].setdefault(what, {})
            if t <= known["forgotten"].get(what, -1):
                raise Broken(f"round {t} is too long ago to know whether its {what} were summed already")
            if revealed.setdefault(str(t), survivors) != survivors:
                raise Broken(
                    f"the {what} of round {t} were summed already, of other sites; the two sums tell their difference"
                )
            while len(revealed) > REMEMBERED:
                oldest = min(revealed, key=int)
                del revealed[oldest]
                known["forgotten"][what] = int(oldest)

    def _once(self, known: dict[str, Any], name: str, value: Any) -> None:
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
            return {"past": [], "revealed": {}, "forgotten": {}}
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
