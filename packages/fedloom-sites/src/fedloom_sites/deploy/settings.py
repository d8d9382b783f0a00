"""Settings of a deployed server and of a deployed site, as two small TOML files.

Both name the same experiment file (one method, one seed) and carry its SHA-256, so that two sides can check whether
they mean the same experiment before anything is trained. Paths in a file are relative to the folder of that file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import tomli_w
from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from fedloom.data.input_spec import InputSpec
from fedloom.data.sources import SOURCES
from fedloom.errors import ConfigError
from fedloom.imports import is_path
from fedloom.storage import read_toml
from fedloom.storage.files import content_of
from fedloom.values import Value, fields_of, make
from fedloom.version import __version__
from fedloom_sites.deploy.secure.changes import CHANGES
from fedloom_sites.deploy.secure.protocol import FEWEST, MOST, least_threshold

V = TypeVar("V", bound=Value)


def _public_key(text: str) -> str:
    """A public key in OpenSSH form, without its comment."""
    kind, _, rest = text.strip().partition(" ")
    if kind not in ("ssh-ed25519", "ecdsa-sha2-nistp384") or not rest:
        raise ValueError(f"must be a public key as one OpenSSH line (ecdsa-sha2-nistp384 or ssh-ed25519), got {text!r}")
    return f"{kind} {rest.split()[0]}"


def _address(text: str) -> str:
    """Host and port of a server."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[^\s/]+", host) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError(f"must be host:port, as fl.example.org:8443, got {text!r}")
    return text


PublicKey = Annotated[str, AfterValidator(_public_key)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
CodePath = Annotated[str, Field(pattern=r"^\w[\w. -]*(/\w[\w. -]*)*\.py$")]
"""A file below the folder of user code."""
Port = Annotated[int, Field(ge=1, le=65535)]


NormBound = PositiveFloat | dict[str, PositiveFloat]
"""The longest difference of every field of an upload, or of each by its name."""


def bound_of(bound: NormBound | None, field: str) -> float:
    """The longest difference of a field of an upload; infinite where none is given."""
    return math.inf if bound is None else bound.get(field, math.inf) if isinstance(bound, dict) else bound


def twin(name: str, names: Iterable[str]) -> str | None:
    """The name, of some, whose folder a disk that ignores case takes for the folder of this one."""
    return next((one for one in names if one.casefold() == name.casefold()), None)


class Secure(Value):
    """Secure aggregation: the server receives masked sums (`fedloom_sites.deploy.secure.protocol`)."""

    threshold: int = Field(ge=FEWEST, description="sites without which no sum is unmasked; more than half of all")
    keys: tuple[PublicKey, ...] = Field(
        min_length=FEWEST, max_length=MOST, description="signing keys, by number of the site"
    )
    norm_bound: NormBound | None = Field(
        None, description="longest difference that a site sends (L2), of every field of an upload or by its name"
    )
    max_share: float = Field(
        0.8, gt=0, le=1, description="largest share of one site in the weight of a sum; a sum beyond is not opened"
    )
    scores: Literal["masked", "per-site", "off"] = Field(
        "masked", description="masked: the server gets sums of scores; per-site: every site's own; off: none"
    )
    names: tuple[Name, ...] = Field(
        (), max_length=MOST, description="names of the sites, by number, by which their sums are remembered"
    )
    changes: int = Field(
        CHANGES,
        ge=0,
        description="how often a site may leave the sums over the same data, or return; each reveals one difference of "
        "that site",
    )
    steady: int | None = Field(
        None,
        ge=0,
        description="sites of every sum that have never left the sums over the same data; no combination of sums is of "
        "fewer, but of sites that have; none: the threshold",
    )

    @model_validator(mode="after")
    def _majority(self) -> Secure:
        n = len(self.keys)
        if self.names and (len(self.names) != n or len({*self.names}) != n):
            raise ValueError(f"names must be of all {n} sites, each once, got {len(self.names)}")
        if not least_threshold(n) <= self.threshold <= n:
            raise ValueError(f"threshold of {n} sites must be within {least_threshold(n)}..{n}, got {self.threshold}")
        return self

    @property
    def steady_sites(self) -> int:
        """Sites of every sum that have never left the sums over the same data."""
        return self.threshold if self.steady is None else self.steady

    def digest(self, fingerprint: str) -> bytes:
        """SHA-256 of these settings and of an experiment's fingerprint."""
        return hashlib.sha256(f"{fingerprint}\n{self.model_dump_json()}".encode()).digest()


class Shared(Value):
    """What the server and every site must agree on."""

    name: Name = Field(description="name of the experiment")
    experiment: Path = Field(description="the experiment file: one method, one seed")
    fingerprint: Digest = Field(description="SHA-256 of the experiment file")
    version: str = Field(description="version of fedloom, the same on all machines")
    clients: int = Field(ge=1, description="sites of the experiment, taking part or not")
    samples: InputSpec = Field(description="what one sample looks like; of a table its columns, levels and flags")
    fixed_data: bool = Field(
        False, description="a site whose samples change in a run is refused; else the change is logged"
    )
    code: dict[CodePath, Digest] = Field(
        {}, description="SHA-256 of the files of user code in the folder code, by path"
    )
    installed: dict[str, Digest] = Field({}, description="SHA-256 of modules of user code that are installed, by name")
    versions: dict[str, str] = Field({}, description="versions of Python and of packages where the directory was made")
    start: Digest | None = Field(None, description="SHA-256 of weights.safetensors beside the settings: initial model")
    models_per_round: PositiveInt = Field(
        3,  # an honest server needs one, and another one where it lost its newest checkpoint; the third is for a twin
        description="models that a site answers to in a round and of a kind of message; the same again is none more",
    )
    models_in_run: PositiveInt | None = Field(
        None,  # one for every round and for the first model, and as many again where every checkpoint is lost once
        description="the same of all rounds; none: twice the number of rounds and two more",
    )
    secure: Secure | None = Field(None, description="secure aggregation; left out: the server receives single uploads")
    data_name: Name = Field(
        "data",
        description="name of the data; what a site remembers of opened sums, and its budgets, hold for all experiments "
        "on data of one name",
    )

    @model_validator(mode="after")
    def _keys_of_all(self) -> Self:
        if self.secure is not None and len(self.secure.keys) != self.clients:
            raise ValueError(f"secure.keys must be of all {self.clients} sites, got {len(self.secure.keys)}")
        return self

    @property
    def survivors(self) -> int | None:
        """Fewest sites of a sum under secure aggregation; None without it."""
        return None if self.secure is None else self.secure.threshold

    @property
    def digest(self) -> str:
        """SHA-256 of all that is agreed on, by which people name a run; the same on every machine."""
        agreed = self.model_dump(mode="json", include={*Shared.model_fields} - {"experiment"})
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()


class Site(Shared):
    """One site: its data, its state, its keys, and where the server is."""

    site: Name = Field(description="name of the site")
    client: int = Field(ge=0, description="number of this site, from 0")
    data: dict[str, Any] = Field(description="where the samples are: source and its options, as in an experiment file")
    data_dir: Path | None = Field(None, description="folder of data sets, where the source is one of fedloom's by name")
    share: Literal["all", "partition"] = Field(
        "all", description="all: every sample of the source is this site's; partition: this client's share of the cut"
    )
    state: Path = Field(Path("state"), description="folder of models and state, which never leave the site")
    memory: Path | None = Field(
        None,
        description="folder of what the site remembers of its data over experiments, the same for all its deployments; "
        "none: the folder state",
    )
    server: Annotated[str, AfterValidator(_address)] = Field(description="address of the server, host:port")
    ca: Path = Field(Path("ca.crt"), description="certificate of the authority that signed the server's certificate")
    node_key: Path = Field(Path("node-key"), description="private key of the connection (ECDSA P-384, OpenSSH form)")
    signing_key: Path = Field(Path("signing-key"), description="private key of the replies (Ed25519, OpenSSH form)")
    port: Port = Field(9094, description="port on loopback that the site's own processes use among themselves")
    threads: int = Field(1, ge=1, description="threads of local training")
    free_disk: int = Field(1024, ge=0, description="megabytes that must be free where the state is")
    message_limit: int = Field(1 << 30, ge=1, description="most bytes of arrays that the site reads from one message")
    model_change: float | None = Field(
        None,
        gt=1,
        description="a model is refused whose norm, whole or of a layer, is this many times that of the last one that "
        "the site trained from, or less by as much; none: any is taken",
    )
    dead_units: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="a model is refused of a layer of which more than this share of units answers to no sample of the "
        "site, as in one made to read samples from the upload; not under a delta; none: any is taken",
    )
    approval: bool = Field(
        False, description="nothing trains here before the run is approved by its digest (fedloom deploy approve)"
    )
    epsilon: PositiveFloat | None = Field(
        None,
        description="epsilon that the site never exceeds; it sends no scores then, nor under a delta; none: no limit",
    )

    @property
    def folder(self) -> Path:
        """The folder of what the site keeps of this experiment."""
        return self.state / self.fingerprint[:16]

    @property
    def memory_folder(self) -> Path:
        """The folder of what the site remembers of the data of this experiment, over all experiments on them."""
        return (self.memory or self.state) / f"data-{self.data_name}"

    @field_validator("data")
    @classmethod
    def _names_source(cls, data: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(data.get("source"), str):
            raise ValueError("needs source, a data set's name or a path")
        return data

    @model_validator(mode="after")
    def _one_of_them(self) -> Site:
        if self.client >= self.clients:
            raise ValueError(f"client must be within 0..{self.clients - 1}, got {self.client}")
        return self


class Member(Value):
    """The server's record of a site."""

    site: Name = Field(description="name of the site")
    client: int = Field(ge=0, description="number of the site, from 0")
    node_key: PublicKey = Field(description="public key of its connection")
    signing_key: PublicKey = Field(description="public key of its replies")


class Server(Shared):
    """The server: who takes part, how long a round waits, what is accepted, where files lie."""

    sites: tuple[Member, ...] = Field(min_length=1, description="the sites that may take part")
    quorum: int = Field(ge=1, description="accepted replies that a round needs")
    deadline: PositiveFloat = Field(600.0, description="seconds after which a round closes if the quorum is there")
    ttl: PositiveFloat = Field(1200.0, description="seconds that a message lives; a round never waits longer")
    pace: float = Field(
        10.0,
        gt=1,
        description="once the quorum is there, a round waits for a site this many times the median seconds of the "
        "other sites (at least 30 s), and never beyond the deadline",
    )
    patience: PositiveFloat = Field(
        600.0,
        description="seconds for which a quorum is waited for, and for which a refused site is left alone",
    )
    absent_after: PositiveInt = Field(
        3,
        description="rounds in which a mute site is asked in vain; then it counts as absent until it answers",
    )
    norm_bound: NormBound | None = Field(
        None,
        description="maximum update norm accepted per site (L2), of every field of an upload or by its name; any "
        "finite norm when left out",
    )
    epsilon: PositiveFloat | None = Field(None, description="the run stops before a client's epsilon exceeds this")
    examples_limit: int = Field(100_000_000, ge=1, description="most training samples that a site may claim")
    message_limit: int = Field(1 << 30, ge=1, description="most bytes of arrays in one reply")
    body_limit: int = Field(
        16 << 20, ge=6 << 20, description="most bytes of one HTTP request; a part of a message has 5 MB"
    )
    address: str = Field(
        "127.0.0.1", description="address the server listens on; loopback, when a gate stands before it"
    )
    port: Port = Field(18000, description="port the server listens on")
    metrics_port: Port | None = Field(None, description="port of metrics in Prometheus' format; none: no endpoint")
    metrics_address: str = Field("127.0.0.1", description="address that the metrics are served on")
    public: str = Field("", description="host:port of the gate that sites connect to; empty: the server itself")
    ca: Path = Field(Path("ca.crt"), description="certificate of the authority")
    certificate: Path = Field(Path("server.crt"), description="certificate of the server")
    key: Path = Field(Path("server.key"), description="private key of the certificate")
    secret: Path = Field(Path("superexec.secret"), description="32 random bytes that the server's own processes share")
    database: Path = Field(Path("state/superlink.db"), description="Flower's database: messages under way, known nodes")
    checkpoints: Path = Field(Path("state/checkpoints"), description="folder of the checkpoints")
    audit: Path = Field(Path("state/audit.jsonl"), description="log of every reply: accepted, or why not")
    results: Path = Field(Path("results"), description="folder of metrics and of the global model")

    @property
    def entrance(self) -> str:
        """What sites connect to, host:port."""
        return self.public or f"{self.address}:{self.port}"

    @property
    def host(self) -> str:
        """Name or address of what sites connect to."""
        return self.entrance.rpartition(":")[0].strip("[]")

    @model_validator(mode="after")
    def _fits(self) -> Server:
        for what in ("site", "client", "node_key", "signing_key"):
            values = [getattr(member, what) for member in self.sites]
            twice = [v for v in values if values.count(v) > 1]
            if twice:
                raise ValueError(f"sites: every {what} once, got {twice[0]!r} twice")
        if max(member.client for member in self.sites) >= self.clients:
            raise ValueError(f"sites: every client must be within 0..{self.clients - 1}")
        if self.quorum > len(self.sites):
            raise ValueError(f"quorum must be at most the {len(self.sites)} sites, got {self.quorum}")
        if self.secure is not None:
            wrong = [m.site for m in self.sites if self.secure.keys[m.client] != m.signing_key]
            if wrong:
                raise ValueError(f"secure.keys must have the signing key of each site at its number, not so {wrong[0]}")
        if self.ttl < self.deadline:
            raise ValueError(f"ttl ({self.ttl} s) must be at least the deadline ({self.deadline} s)")
        return self


def read_site(path: Path) -> Site:
    """A site's TOML file; paths come back absolute, also those of its data.

    Raises:
        ConfigError: the file is missing or has a value that cannot be.
    """
    site, folder = _read(Site, path, "site file"), path.parent.resolve()
    source = site.data["source"]
    is_file = bool({"/", "\\"} & set(source) or Path(source).suffix or (folder / source).exists())
    keys = ("path", "source") if is_file and source not in SOURCES and not is_path(source) else ("path",)
    keys = ("path",) if source.startswith("hub:") else keys
    places = {key: site.data[key] for key in keys if isinstance(site.data.get(key), str)}
    data = site.data | {key: str(folder / Path(place).expanduser()) for key, place in places.items()}
    return site.model_copy(update={"data": data})


def read_server(path: Path) -> Server:
    """A server's TOML file; paths come back absolute.

    Raises:
        ConfigError: the file is missing or has a value that cannot be.
    """
    return _read(Server, path, "server file")


def check_version(shared: Shared) -> None:
    """Refuse another version of fedloom than the one that was agreed on.

    Raises:
        ConfigError: the versions differ; both are named.
    """
    if shared.version != __version__:
        raise ConfigError(f"fedloom is {__version__} here, the experiment runs {shared.version}; install that")


def placed(value: V, folder: Path) -> V:
    """Settings whose relative paths are taken from ``folder``.

    Raises:
        ConfigError: a path holds the character NUL.
    """
    paths = {name: folder / v for name in type(value).model_fields if isinstance(v := getattr(value, name), Path)}
    for name, path in paths.items():
        if "\0" in str(path):
            raise ConfigError(f"{folder}: {name} = {str(path)!r} holds the character NUL, and no path does; correct it")
    return value.model_copy(update=paths)


def text_of(value: Value) -> str:
    """A value as the text of a TOML file; reading it back gives the same value.

    The table of the data comes first, since a site edits that one.
    """
    tables = value.model_dump(mode="json", exclude_none=True)
    return tomli_w.dumps({key: tables.pop(key) for key in ("data",) if key in tables} | tables)


def check_fingerprint(shared: Shared) -> bytes:
    """Refuse an experiment file other than the one that was agreed on.

    Returns:
        Its content, as it was compared.

    Raises:
        ConfigError: it cannot be read, or the digests differ; both are named.
    """
    content = content_of(shared.experiment, "the experiment file")
    check_agreed(f"{shared.experiment}", "experiment file", content, shared.fingerprint)
    return content


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def check_agreed(
    what: str, kind: str, content: bytes, wanted: str, cure: str = "get the file from the server again"
) -> None:
    """Refuse content of another SHA-256 than was agreed on.

    Raises:
        ConfigError: the digests differ; both are named.
    """
    got = digest(content)
    if got != wanted:
        raise ConfigError(
            f"{what} is not the {kind} that was agreed on: its SHA-256 is {got[:16]}..., agreed was {wanted[:16]}...; "
            f"{cure}"
        )


def _read(kind: type[V], path: Path, what: str) -> V:
    document = read_toml(path, what)
    try:
        value = make(kind, document, str(path), fields_of(kind))
    except ConfigError as error:
        release = document.get("version", __version__)
        if release == __version__:
            raise
        raise ConfigError(
            f"{error}; the file is of fedloom {release}, here it is {__version__}: install that"
        ) from None
    return placed(value, path.parent.resolve())
