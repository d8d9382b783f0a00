"""Settings of a deployed server and of a deployed site, stored in two small TOML files.

Both refer to the same experiment file (one method, one seed) and contain its SHA-256, so that both sides can check
before training that they run the same experiment. Paths in a file are relative to the folder that contains the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from fedloom.data.input_spec import InputSpec
from fedloom.values import Value
from fedloom_sites.deploy.secure.changes import MAX_CHANGES
from fedloom_sites.deploy.secure.protocol import MAX_SITES, MIN_SITES, min_threshold


def _check_public_key(text: str) -> str:
    """Check a public key in OpenSSH format, and return it without its comment."""
    kind, _, rest = text.strip().partition(" ")
    if kind not in ("ssh-ed25519", "ecdsa-sha2-nistp384") or not rest:
        raise ValueError(f"must be a single-line OpenSSH public key (ecdsa-sha2-nistp384 or ssh-ed25519), got {text!r}")
    return f"{kind} {rest.split()[0]}"


def _check_address(text: str) -> str:
    """Check that a server's address has the form host:port, and return it."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[^\s/]+", host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError(f"must be host:port, such as fl.example.org:8443, got {text!r}")
    return text


PublicKey = Annotated[str, AfterValidator(_check_public_key)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
CodePath = Annotated[str, Field(pattern=r"^\w[\w. -]*(/\w[\w. -]*)*\.py$")]
"""Path of a file inside the folder with user code."""
Port = Annotated[int, Field(ge=1, le=65535)]


NormBound = PositiveFloat | dict[str, PositiveFloat]
"""Maximum norm of the difference in every field of an upload, or in each field by its name."""


def get_norm_bound(bound: NormBound | None, field: str) -> float:
    """Return the maximum norm of the difference in one field of an upload.

    The result is infinite if no bound applies.
    """
    return math.inf if bound is None else bound.get(field, math.inf) if isinstance(bound, dict) else bound


def find_case_twin(name: str, names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that equals ``name`` on a case-insensitive disk, or None if there is none."""
    return next((one for one in names if one.casefold() == name.casefold()), None)


def check_own_keys(kind: str, keys: Mapping[str, str]) -> None:
    """Check that no two sites have the same key.

    Args:
        kind: which key of a site.
        keys: public keys, keyed by the names of the sites.

    Raises:
        ValueError: two sites have the same key. The message names both.
    """
    owners = dict[str, str]()
    for name, key in keys.items():
        if (other := owners.setdefault(key, name)) != name:
            raise ValueError(
                f"{other} and {name} have the same {kind}, but every site needs its own. At each of the two sites, "
                f"'ssh-keygen -y -f {kind.replace('_', '-')}' prints the correct key"
            )


MAX_SAFE_SHARE = 0.8  # at least a fifth of the sum comes from the other sites
"""Share of a sum's weight above which the sum would nearly reveal a site's upload."""


class SecureSettings(Value):
    """Secure aggregation: the server receives masked sums (see `fedloom_sites.deploy.secure.protocol`)."""

    threshold: int = Field(
        ge=MIN_SITES,
        description="minimum number of sites in a sum before it can be unmasked. Must be more than half of all sites",
    )
    keys: tuple[PublicKey, ...] = Field(
        min_length=MIN_SITES, max_length=MAX_SITES, description="signing keys, in the order of the sites' numbers"
    )
    norm_bound: NormBound | None = Field(
        None, description="maximum L2 norm of the difference that a site sends, for all upload fields or per field"
    )
    max_share: float = Field(
        MAX_SAFE_SHARE,
        gt=0,
        le=1,
        description="maximum share of a sum's weight for one site. A sum with a larger share is not decrypted",
    )
    scores: Literal["masked", "per-site", "off"] = Field(
        "masked",
        description=(
            "scores that the server receives. masked: sums of scores. per-site: every site's own scores. off: no scores"
        ),
    )
    names: tuple[Name, ...] = Field(
        (),
        max_length=MAX_SITES,
        description="names of the sites, in the order of their numbers. Sites record past sums under these names",
    )
    changes: int = Field(
        MAX_CHANGES,
        ge=0,
        description="maximum number of times that a site may leave the sums over the same data or rejoin them. "
        "Each change reveals one difference between the site's uploads",
    )
    steady: int | None = Field(
        None,
        ge=0,
        description="minimum number of sites in every sum that have never left the sums over the same data. Any "
        "combination of sums contains at least this many sites, not counting those that left (None: the threshold)",
    )

    verify: bool = Field(
        False,
        description="whether every site opens the sums itself, replays the server's steps, and trains and scores only "
        "models that it has computed from these sums",
    )

    @model_validator(mode="after")
    def _majority(self) -> SecureSettings:
        n = len(self.keys)
        if self.verify and self.scores != "masked":
            raise ValueError(
                f"verify needs scores = 'masked', because with scores = {self.scores!r}, sites receive models outside "
                "the sums"
            )
        if self.names and (len(self.names) != n or len({*self.names}) != n):
            raise ValueError(f"names must list all {n} sites, each once, got {len(self.names)}")
        names = self.names or tuple(f"site number {client}" for client in range(n))
        check_own_keys("signing_key", dict(zip(names, self.keys, strict=True)))
        if not min_threshold(n) <= self.threshold <= n:
            raise ValueError(f"threshold must be from {min_threshold(n)} to {n} for {n} sites, got {self.threshold}")
        return self

    @property
    def steady_sites(self) -> int:
        """Number of sites in every sum that have never left the sums over the same data."""
        return self.threshold if self.steady is None else self.steady

    def digest(self, fingerprint: str) -> bytes:
        """Return the SHA-256 of these settings together with an experiment's fingerprint."""
        return hashlib.sha256(f"{fingerprint}\n{self.model_dump_json()}".encode()).digest()


class SharedSettings(Value):
    """Settings that the server and every site must agree on."""

    name: Name = Field(description="name of the experiment")
    experiment: Path = Field(description="experiment file with one method and one seed")
    fingerprint: Digest = Field(description="SHA-256 of the experiment file")
    version: str = Field(description="version of fedloom, which must be the same on all machines")
    clients: int = Field(ge=1, description="number of sites in the experiment, whether or not they take part")
    samples: InputSpec = Field(
        description="description of a sample, which for a table includes its columns, levels and flags"
    )
    fixed_data: bool = Field(
        False, description="reject a site whose samples change during a run, instead of logging the change"
    )
    code: dict[CodePath, Digest] = Field({}, description="SHA-256 of each user code file in the folder code, by path")
    installed: dict[str, Digest] = Field({}, description="SHA-256 of each installed module of user code, by name")
    versions: dict[str, str] = Field(
        {}, description="versions of Python and of packages on the machine that created the directory"
    )
    start: Digest | None = Field(
        None, description="SHA-256 of weights.safetensors, the initial model next to the settings file"
    )
    models_per_round: PositiveInt = Field(
        3,  # an honest server needs one, and a second one after it has lost its newest checkpoint. The third is spare
        description="maximum number of models that a site replies to, per round and kind of message. Repeated "
        "messages do not count",
    )
    models_in_run: PositiveInt | None = Field(
        None,  # one for every round and one for the first model, doubled in case every checkpoint is lost once
        description="maximum number of models that a site replies to in all rounds (default: twice the number "
        "of rounds, plus two)",
    )
    secure: SecureSettings | None = Field(
        None, description="secure aggregation (default: off, so the server receives individual uploads)"
    )
    data_name: Name = Field(
        "data",
        description="name of the data set. A site's record of decrypted sums and its budgets apply to all "
        "experiments on data with this name",
    )

    @model_validator(mode="after")
    def _keys_of_all(self) -> Self:
        if self.secure is not None and len(self.secure.keys) != self.clients:
            raise ValueError(f"secure.keys must list the keys of all {self.clients} sites, got {len(self.secure.keys)}")
        return self

    @property
    def survivors(self) -> int | None:
        """Minimum number of sites in a sum under secure aggregation. None without it."""
        return None if self.secure is None else self.secure.threshold

    @property
    def verifies(self) -> bool:
        """True if every site opens the masked sums itself."""
        return self.secure is not None and self.secure.verify

    @property
    def digest(self) -> str:
        """SHA-256 of the complete agreement, which people use to identify a run.

        The value is the same on every machine.
        """
        agreed = self.model_dump(mode="json", include={*SharedSettings.model_fields} - {"experiment"})
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()


class Site(SharedSettings):
    """Settings of a site: its data, state and keys, and the address of the server."""

    site: Name = Field(description="name of the site")
    client: int = Field(ge=0, description="number of this site, counted from 0")
    data: dict[str, Any] = Field(
        description="source of the samples, with the source's options, as in an experiment file"
    )
    data_dir: Path | None = Field(None, description="data folder, for sources that fedloom knows by name")
    share: Literal["all", "partition"] = Field(
        "all",
        description=(
            "part of the source that contains the site's data. all: the source contains only this site's "
            "samples. partition: the site takes the part of its client"
        ),
    )
    state: Path = Field(Path("state"), description="folder for models and state, which never leave the site")
    memory: Path | None = Field(
        None,
        description="folder for the site's record of its data across experiments (sums, budgets, snapshots, "
        "analyses), the same for all deployments of the site (None: the folder state)",
    )
    snapshot: str | None = Field(
        None,
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="date of the data snapshot that the site reads, created by fedloom deploy snapshot (default: "
        "the current data)",
    )
    server: Annotated[str, AfterValidator(_check_address)] = Field(description="address of the server, host:port")
    ca: Path = Field(
        Path("ca.crt"), description="certificate of the certificate authority that signed the server's certificate"
    )
    node_key: Path = Field(Path("node-key"), description="private key for the connection (ECDSA P-384, OpenSSH format)")
    signing_key: Path = Field(
        Path("signing-key"), description="private key that signs replies (Ed25519, OpenSSH format)"
    )
    port: Port = Field(9094, description="loopback port for the site's own processes")
    threads: int = Field(1, ge=1, description="number of threads for local training")
    free_disk: int = Field(1024, ge=0, description="free space in megabytes required on the state's disk")
    message_limit: int = Field(
        1 << 30, ge=1, description="maximum size of the arrays in one message to the site, in bytes"
    )
    model_change: float | None = Field(
        None,
        gt=1,
        description=(
            "maximum ratio, in either direction, between the norm of a received model (or one of its "
            "layers) and the norm of the model that the site last trained from. The site rejects "
            "models that exceed this ratio (default: no limit)"
        ),
    )
    dead_units: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "maximum fraction of a layer's units that do not respond to any of the site's samples. "
            "The site rejects models with a larger fraction, such as a model crafted to read "
            "samples. Not allowed with a delta or an epsilon (default: no limit)"
        ),
    )
    approval: bool = Field(
        False, description="train only after the site has approved the digest of the run (fedloom deploy approve)"
    )
    epsilon: PositiveFloat | None = Field(
        None,
        description=(
            "maximum epsilon of the site. If this limit or a delta is set, the site sends no scores (default: no limit)"
        ),
    )

    @property
    def folder(self) -> Path:
        """Folder with the site's files for this experiment."""
        return self.state / self.fingerprint[:16]

    @property
    def memory_folder(self) -> Path:
        """Folder for what the site remembers about this experiment's data, across all experiments on these data."""
        return (self.memory or self.state) / f"data-{self.data_name}"

    @field_validator("data")
    @classmethod
    def _names_source(cls, data: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(data.get("source"), str):
            raise ValueError("must contain source: the name of a data set, or a path")
        return data

    @model_validator(mode="after")
    def _one_of_them(self) -> Site:
        if self.verifies and self.epsilon is not None:
            raise ValueError(
                "epsilon needs uploads with noise, which verify in the table secure does not allow. Omit epsilon or "
                "verify"
            )
        if self.client >= self.clients:
            raise ValueError(f"client must be from 0 to {self.clients - 1}, got {self.client}")
        return self


class Member(Value):
    """The server's record of a site."""

    site: Name = Field(description="name of the site")
    client: int = Field(ge=0, description="number of the site, counted from 0")
    node_key: PublicKey = Field(description="public key for the site's connection")
    signing_key: PublicKey = Field(description="public key that verifies the site's replies")


class Server(SharedSettings):
    """Settings of the server: sites, waiting times, limits on messages, and folders."""

    sites: tuple[Member, ...] = Field(min_length=1, description="sites that may take part")
    quorum: int = Field(ge=1, description="number of accepted replies that a round needs")
    deadline: PositiveFloat = Field(600.0, description="time in seconds before a round with a quorum closes")
    ttl: PositiveFloat = Field(
        1200.0, description="lifetime of a message in seconds, also the maximum waiting time in a round"
    )
    pace: float = Field(
        10.0,
        gt=1,
        description=(
            "maximum time to wait for a slow site after a quorum has replied, as a multiple of the "
            "other sites' median time (at least 30 s, and at most until the deadline)"
        ),
    )
    patience: PositiveFloat = Field(
        600.0,
        description="time in seconds to wait for a quorum, and also the time before the server asks a rejected "
        "site again",
    )
    absent_after: PositiveInt = Field(
        3, description="number of unanswered rounds after which a silent site counts as absent until it replies again"
    )
    norm_bound: NormBound | None = Field(
        None,
        description=(
            "maximum L2 norm of an accepted update, for all upload fields or per field (default: any finite norm)"
        ),
    )
    epsilon: PositiveFloat | None = Field(
        None, description="maximum epsilon of a client. The run stops before a client exceeds this limit"
    )
    examples_limit: int = Field(
        100_000_000, ge=1, description="maximum number of training samples that a site may claim"
    )
    message_limit: int = Field(1 << 30, ge=1, description="maximum size of the arrays in one reply, in bytes")
    body_limit: int = Field(
        16 << 20, ge=6 << 20, description="maximum number of bytes of one HTTP request. Each part of a message has 5 MB"
    )
    address: str = Field(
        "127.0.0.1", description="address that the server listens on. Use the loopback address behind a reverse proxy"
    )
    port: Port = Field(18000, description="port that the server listens on")
    metrics_port: Port | None = Field(None, description="port for Prometheus metrics (default: no endpoint)")
    metrics_address: str = Field("127.0.0.1", description="address of the metrics endpoint")
    public: str = Field(
        "", description="host:port of the reverse proxy that sites connect to (empty: sites connect to the server)"
    )
    ca: Path = Field(Path("ca.crt"), description="certificate of the certificate authority")
    certificate: Path = Field(Path("server.crt"), description="certificate of the server")
    key: Path = Field(Path("server.key"), description="private key for the server's certificate")
    secret: Path = Field(Path("superexec.secret"), description="32 random bytes shared by the server's own processes")
    database: Path = Field(
        Path("state/superlink.db"), description="Flower's database of pending messages and known nodes"
    )
    checkpoints: Path = Field(Path("state/checkpoints"), description="checkpoint folder")
    audit: Path = Field(
        Path("state/audit.jsonl"), description="log of all replies, accepted or rejected, with the reason"
    )
    results: Path = Field(Path("results"), description="folder for the metrics and the global model")

    @property
    def public_address(self) -> str:
        """Address that sites connect to, as host:port."""
        return self.public or f"{self.address}:{self.port}"

    @property
    def host(self) -> str:
        """Host name or address that sites connect to."""
        return self.public_address.rpartition(":")[0].strip("[]")

    @model_validator(mode="after")
    def _fits(self) -> Server:
        for kind in ("node_key", "signing_key"):
            check_own_keys(kind, {member.site: getattr(member, kind) for member in self.sites})
        for what in ("site", "client"):
            values = [getattr(member, what) for member in self.sites]
            twice = [v for v in values if values.count(v) > 1]
            if twice:
                raise ValueError(f"sites: every {what} may occur only once, got {twice[0]!r} twice")
        if max(member.client for member in self.sites) >= self.clients:
            raise ValueError(f"sites: every client number must be from 0 to {self.clients - 1}")
        if self.quorum > len(self.sites):
            raise ValueError(f"quorum must be at most the number of sites ({len(self.sites)}), got {self.quorum}")
        if self.secure is not None:
            wrong = [m.site for m in self.sites if self.secure.keys[m.client] != m.signing_key]
            if wrong:
                raise ValueError(
                    "secure.keys must list the signing key of each site under its number, but the "
                    f"key of {wrong[0]} is wrong"
                )
        if self.ttl < self.deadline:
            raise ValueError(f"ttl ({self.ttl} s) must be at least the deadline ({self.deadline} s)")
        return self
