"""Checks before a site joins, which find everything that would later stop the site. Each finding is a sentence."""

from __future__ import annotations

import math
import os
import shutil
import ssl
import stat
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedloom.engine.privacy import epsilon, find_accounted_noise
from fedloom.errors import ConfigError, FedloomError
from fedloom.lab.experiment import Experiment
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import read_content
from fedloom.version import __version__
from fedloom_sites.deploy.clock import clock_fault
from fedloom_sites.deploy.code import read_agreed
from fedloom_sites.deploy.noise import deployed_setting, get_site_noise, remaining_noise
from fedloom_sites.deploy.ops.keys import EXPIRY_NOTICE
from fedloom_sites.deploy.ops.processes import check_free
from fedloom_sites.deploy.protocol.identity import SITE_KEY_HINT, public_key_line, public_key_path
from fedloom_sites.deploy.secure.changes import MAX_CHANGES
from fedloom_sites.deploy.secure.opened import OPENED_FILE, has_used_turns, read_checked
from fedloom_sites.deploy.server.run import check_deployable, sample_count_reason
from fedloom_sites.deploy.setting_files import SERVER_FILE, read_server
from fedloom_sites.deploy.settings import MAX_SAFE_SHARE, Site
from fedloom_sites.deploy.site.approval import check_data_name, count_experiments
from fedloom_sites.deploy.site.ledger import Ledger
from fedloom_sites.deploy.site.local_data import part_sizes, site_federation

FLOWER_VERSIONS = ((1, 41), (1, 43))
"""Minimum supported version of Flower, and the first later version that is not known to work."""
COMPARED_PACKAGES = (
    *("torch", "numpy", "numba", "flwr", "cryptography", "pycryptodome", "opendp", "safetensors", "pydantic"),
    *("pyarrow", "pandas", "scipy", "protobuf", "grpcio"),
)
"""Packages whose versions `check_site` compares."""
SERVER_NAME_HINT = (
    "correct server in site.toml, or ask the coordinator to run 'fedloom deploy renew' with --host of this name"
)
RENEWAL_HINT = "Ask the coordinator to renew it: fedloom deploy renew"
"""Advice about a certificate of the server that has expired."""
CERTIFICATE_HINTS = {
    9: "set the clock of this machine, or the clock of the machine that made the certificate",
    10: "ask the coordinator to run 'fedloom deploy renew', or set the clock of this machine",
    62: SERVER_NAME_HINT,
    64: SERVER_NAME_HINT,
}
"""Advice about a certificate from the correct authority, keyed by OpenSSL's error number."""


class CheckFinding(NamedTuple):
    """Result of one check.

    Attributes:
        level: ok, note (worth knowing) or refused (the site cannot take part).
        sentence: the finding.
    """

    level: Literal["ok", "note", "refused"]
    sentence: str


SiteCheck = Callable[[Site], Iterator[CheckFinding]]


def check_site(site: Site, *, offline: bool = False) -> Iterator[CheckFinding]:
    """Yield the findings of all checks of a site, ordered so that the first refusal is the first one to fix.

    Args:
        site: the site's settings.
        offline: True to omit the connection to the server.
    """
    checks: tuple[SiteCheck, ...] = (
        _check_versions, _check_experiment, _check_data, _check_memory, _check_keys, _check_authority, _check_disk,
        _check_port,
    )  # fmt: skip
    findings: set[CheckFinding] = set()
    for check in checks if offline else (*checks, _check_server):
        for finding in _run_check(check, site):
            if finding not in findings:
                findings.add(finding)
                yield finding


def _run_check(check: SiteCheck, site: Site) -> Iterator[CheckFinding]:
    try:
        yield from check(site)
    except FedloomError as error:
        yield CheckFinding("refused", f"{error}")


def _check_versions(site: Site) -> Iterator[CheckFinding]:
    if __version__ != site.version:
        yield CheckFinding(
            "refused", f"fedloom is {__version__} here, but the experiment runs {site.version}. Install that version"
        )
    try:
        flower = version("flwr")
    except PackageNotFoundError:
        yield CheckFinding("refused", "Flower is not installed. Run: pip install 'fedloom-sites[deploy]'")
        return
    low, high = FLOWER_VERSIONS
    if low <= tuple(int(part) for part in flower.split(".")[:2]) < high:
        here = read_relevant_versions()
        yield CheckFinding("ok", f"versions: fedloom {__version__}, Flower {flower}, Python {here['python']}")
        differing = [f"{k} {here.get(k, 'missing')}, there {v}" for k, v in site.versions.items() if here.get(k) != v]
        if differing:
            yield CheckFinding("note", f"versions that differ from the server's at setup: {'; '.join(differing)}")
    else:
        bounds = f"{low[0]}.{low[1]} or newer, below {high[0]}.{high[1]}"
        yield CheckFinding(
            "refused", f"Flower is {flower} here, but fedloom needs {bounds}. Install a version in this range"
        )


def read_relevant_versions() -> dict[str, str]:
    """Return the versions that can affect a result: Python, and packages that train, mask, sign or transport."""
    numbers = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in COMPARED_PACKAGES:
        with suppress(PackageNotFoundError):
            numbers[package] = version(package)
    return numbers


def _check_experiment(site: Site) -> Iterator[CheckFinding]:
    experiment = read_agreed(site)
    masked, start = site.secure is not None, site.start is not None
    check_deployable(experiment, masked=masked, start=start, verify=site.verifies)
    yield CheckFinding("ok", f"experiment: {site.name}, SHA-256 {site.fingerprint[:16]}...")
    yield from _check_privacy(site, experiment)
    modules = [*site.code, *site.installed]
    if modules:
        yield CheckFinding(
            "ok", f"user code: {', '.join(modules)}: the agreed version is installed here and can be imported"
        )


def _check_privacy(site: Site, experiment: Experiment) -> Iterator[CheckFinding]:
    setting = deployed_setting(experiment.methods[0].setting, site.survivors)
    noise = get_site_noise(setting)
    if noise is not None:
        one, most = epsilon(noise, 1), epsilon(noise, setting.rounds)
        cost = f"one upload costs epsilon {one:.3g}, and {setting.rounds} cost {most:.3g}, at delta {noise.delta}"
        alone = remaining_noise(noise)
        if alone is not None:
            cost += f" ({epsilon(alone, setting.rounds):.3g} against all other sites of a smallest sum)"
        yield CheckFinding("ok", f"privacy: {cost}; scores never leave this site")
    elif site.epsilon is not None:
        Ledger(site.state, None, site.epsilon, f"site {site.site}").release(0)
    elif find_accounted_noise(None, setting.aggregator) is not None:
        yield CheckFinding(
            "ok",
            "privacy: the server adds the noise, so it receives uploads without noise. Scores do not leave this site",
        )


def _check_data(site: Site) -> Iterator[CheckFinding]:
    fed = site_federation(read_agreed(site), site)
    train, validation, test = part_sizes(fed, site.client)
    if train == 0:
        few = "" if site.secure is None else f"; every sum needs {site.secure.threshold} other sites with samples"
        yield CheckFinding(
            "note", f"data: there are no samples. The site will receive models but contribute nothing{few}"
        )
        return
    yield from _check_weight_share(site, train)
    for note in fed.data.notes:
        yield CheckFinding("note", f"data: {note}")
    yield CheckFinding("ok", f"data: {train} samples for training, {validation} for validation, {test} for test")
    if not fed.data.classes:
        return
    counts = fed.class_counts("train")[site.client].tolist()
    lacking = [name for name, count in zip(fed.data.classes, counts, strict=True) if count == 0]
    if lacking:
        unscored = ", and AUROC is undefined here" if fed.data.task == "binary" else ""
        yield CheckFinding(
            "note", f"labels: there are no training samples of {', '.join(lacking)}. The site can still train{unscored}"
        )
    else:
        what = "classes" if fed.data.classed else "labels"
        yield CheckFinding("ok", f"labels: all {len(counts)} {what}; the rarest has {min(counts)} training samples")


def _check_memory(site: Site) -> Iterator[CheckFinding]:
    """Yield a finding on how many earlier experiments on its data the site remembers (under masks or an epsilon)."""
    if site.secure is None and site.epsilon is None:
        return
    check_data_name(site)
    count, where = count_experiments(site), f"memory of the data {site.data_name!r}"
    if count:
        yield CheckFinding("ok", f"{where}: {count} earlier experiments here, whose sums and budgets still count")
    else:
        yield CheckFinding(
            "note",
            f"{where}: there is no earlier experiment. If this site has sent sums of these data in another "
            "deployment, set "
            "memory in both site.toml files to the same folder, and add this folder to ReadWritePaths in the site's "
            "systemd units",
        )


def _check_weight_share(site: Site, train: int) -> Iterator[CheckFinding]:
    """Yield notes on whether one site may have too large a share of the weight in a secure sum."""
    if site.secure is None:
        return
    if has_used_turns(read_checked(site.memory_folder / OPENED_FILE) or {}, site.secure.changes):
        yield CheckFinding(
            "note",
            "sums: this site sends only neutral uploads from now on, because its uploads on these data have switched "
            "between neutral and non-neutral too often. Its log states why uploads were neutral. Agree on more "
            "changes (key `changes` in the table `secure`), or continue without this site",
        )
    if site.secure.changes > MAX_CHANGES or site.secure.steady_sites < site.secure.threshold:
        yield CheckFinding(
            "note",
            f"sums: changes = {site.secure.changes} and steady = {site.secure.steady_sites} let the server compute "
            f"differences that reveal more about individual sites than the usual values {MAX_CHANGES} and "
            f"{site.secure.threshold} do. Ask the coordinator for the reason before you take part",
        )
    most, setting = site.secure.max_share, read_agreed(site).methods[0].setting
    if most > MAX_SAFE_SHARE:
        yield CheckFinding(
            "note",
            f"sums: max_share = {most:g} allows one site to have {most:.0%} of the weight of a sum, and such a sum "
            f"nearly reveals the site's upload. Ask the coordinator to set it to {MAX_SAFE_SHARE:g} or less",
        )
    if most == 1:
        return
    cure = "ask the coordinator for a larger max_share in [secure] at all sites, or for other weights"
    if isinstance(setting.client_weights, list | tuple):
        share = setting.client_weights[site.client] / sum(setting.client_weights)
        if share > min(most, MAX_SAFE_SHARE):
            yield CheckFinding(
                "note",
                f"sums: this site has {share:.0%} of the total weight, but at most {most:.0%} is allowed; {cure}",
            )
    elif sample_count_reason(setting.resolved()):
        rest = math.ceil(train * (1 - most) / most)
        yield CheckFinding(
            "note",
            f"sums: a site may have at most {most:.0%} of the weight, so the other sites in every sum "
            f"must have at least {rest} training samples together. If they have fewer samples, {cure}",
        )


def _check_keys(site: Site) -> Iterator[CheckFinding]:
    kinds = (
        (site.node_key, ec.EllipticCurvePrivateKey, "ECDSA P-384"),
        (site.signing_key, ed25519.Ed25519PrivateKey, "Ed25519"),
    )
    fine = True
    for path, kind, name in kinds:
        for sentence in _key_faults(path, kind, name):
            fine = False
            yield CheckFinding("refused", sentence)
    for sentence in _foreign_keys(site) if fine else ():
        fine = False
        yield CheckFinding("refused", f"{sentence}. {SITE_KEY_HINT}")
    if fine:
        yield CheckFinding("ok", "keys: both exist and are readable only by their owner")


def _foreign_keys(site: Site) -> Iterator[str]:
    """Yield a sentence for each private key that is not the key of this site.

    The agreement under secure aggregation, the server's settings in the directory of a whole deployment, and the public
    key next to a private key show whose key it is.
    """
    lists: dict[str, dict[str, str]] = {"node_key": {}, "signing_key": {}}
    with suppress(ConfigError):  # of a site's machine, where the server's settings are missing
        for member in read_server(site.experiment.parent.parent.parent / "server" / SERVER_FILE).sites:
            for kind, known in lists.items():
                known[member.site] = getattr(member, kind)
    if site.secure is not None:
        names = site.secure.names or map(str, range(site.clients))
        lists["signing_key"] = dict(zip(names, site.secure.keys, strict=True))
    for kind, known in lists.items():
        path: Path = getattr(site, kind)
        line, public = public_key_line(read_content(path)), public_key_path(path)
        owner = next((name for name, key in known.items() if key == line), None)
        if owner is not None and owner not in (site.site, str(site.client)):
            yield f"{path} is {owner}'s key, not {site.site}'s"
        elif owner is None and known:
            yield f"{path} is not the agreed-upon key of {site.site}"
        elif public.exists() and not read_content(public).decode(errors="replace").startswith(line):
            yield f"{path} is not the private key of {public.name}, so it is not the agreed key of {site.site}"


def _key_faults(path: Path, kind: type, name: str) -> Iterator[str]:
    try:
        mode, data = stat.S_IMODE(path.stat().st_mode), check_regular_file(path).read_bytes()
    except OSError as error:
        yield f"cannot read the private key {path}: {error.strerror}. {SITE_KEY_HINT}"
        return
    if mode & 0o077:
        yield f"{path} can be read by others (mode {mode:o}). Run: chmod 600 {path}"
    try:
        key = load_ssh_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        fault = str(error).splitlines()[0]
        yield f"{path} is not an OpenSSH private key without a passphrase: {fault}. {SITE_KEY_HINT}"
        return
    if not isinstance(key, kind) or (isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name != "secp384r1"):
        yield f"{path} must be an {name} key. {SITE_KEY_HINT}"


def _check_authority(site: Site) -> Iterator[CheckFinding]:
    try:
        certificate = x509.load_pem_x509_certificate(check_regular_file(site.ca).read_bytes())
    except OSError as error:
        yield CheckFinding(
            "refused",
            f"cannot read the authority's certificate {site.ca}: {error.strerror}. Get the file again from the "
            "server's administrator",
        )
        return
    except ValueError:
        yield CheckFinding(
            "refused",
            f"{site.ca} is not a certificate in PEM format. Get the file again from the server's administrator",
        )
        return
    yield _check_certificate_dates(
        "the authority's certificate", certificate,
        "It cannot be replaced. Ask the coordinator for a new deployment (fedloom deploy init)",
    )  # fmt: skip


def _check_certificate_dates(what: str, certificate: x509.Certificate, cure: str) -> CheckFinding:
    now, start, end = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        return CheckFinding(
            "refused",
            f"{what} expired on {end:%Y-%m-%d %H:%M} UTC. {cure}",
        )
    if now < start:
        here = f"the time here is {now:%Y-%m-%d %H:%M}. Set the clock"
        return CheckFinding("refused", f"{what} is not valid before {start:%Y-%m-%d %H:%M} UTC, {here}")
    if now > end - EXPIRY_NOTICE:
        return CheckFinding("note", f"{what} expires soon, on {end:%Y-%m-%d}")
    return CheckFinding("ok", f"{what} is valid until {end:%Y-%m-%d}")


def _check_disk(site: Site) -> Iterator[CheckFinding]:
    folder = next(path for path in (site.state, *site.state.parents) if path.exists())
    try:
        with NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield CheckFinding("refused", f"cannot write to {folder}: {error.strerror}. The site stores its models there")
        return
    free = shutil.disk_usage(folder).free >> 20
    if free < site.free_disk:
        yield CheckFinding(
            "refused",
            f"only {free} MB are free at {folder}, but free_disk requires {site.free_disk} MB. Free some space",
        )
    else:
        yield CheckFinding("ok", f"disk: {free} MB are free at {folder}")


def _check_port(site: Site) -> Iterator[CheckFinding]:
    cure = "If this site is running, it uses the port itself, and nothing is wrong. Otherwise, choose another `port`"
    check_free(site.port, site.site, cure)
    yield CheckFinding("ok", f"port {site.port} on loopback is free")


def _check_server(site: Site) -> Iterator[CheckFinding]:
    host, _, port = site.server.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=os.fspath(site.ca))
    except OSError:
        return  # reported already, for the authority's certificate
    connection = HTTPSConnection(host.strip("[]"), int(port), timeout=10, context=context)
    findings = [*_greet(connection, site.server)]
    yield from findings
    if all(finding.level != "refused" for finding in findings):
        yield from _check_registration(site, connection)


def _check_registration(site: Site, connection: HTTPSConnection) -> Iterator[CheckFinding]:
    """Yield a finding that states whether the server admits the site's connection key.

    The request contains a heartbeat interval that the server rejects even for a registered key, so it changes nothing
    there.
    """
    from fedloom_sites.flwr_adapter import (
        FLEET_HTTP_PUBLIC_KEY_HEADER,
        FLEET_HTTP_SIGNATURE_HEADER,
        PROTOBUF_MEDIA_TYPE,
        TIMESTAMP_HEADER,
        ActivateNodeRequest,
        public_key_to_bytes,
        sign_message,
    )

    try:
        key = load_ssh_private_key(check_regular_file(site.node_key).read_bytes(), password=None)
    except (OSError, ValueError, TypeError):
        return  # reported already, for the keys
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return
    public, time = public_key_to_bytes(key.public_key()), datetime.now(UTC).isoformat()
    headers = {
        "Content-Type": PROTOBUF_MEDIA_TYPE,
        TIMESTAMP_HEADER: time,
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, time.encode())).decode(),
    }
    body = ActivateNodeRequest(public_key=public, heartbeat_interval=-1.0).SerializeToString()
    try:
        connection.request("POST", "/v1/fleet/activate-node", body, headers)
        status = connection.getresponse().status
    except (OSError, HTTPException):
        return
    finally:
        connection.close()
    if status == HTTPStatus.PRECONDITION_FAILED:
        why = "it was never registered there, or it was revoked. Ask the coordinator"
        yield CheckFinding("refused", f"the server rejects the key of {site.site}: {why}")
    elif status == HTTPStatus.BAD_REQUEST:
        yield CheckFinding(
            "ok",
            f"key: the server accepts the key of {site.site}, unless a node with the same key is already connected",
        )


def _greet(connection: HTTPSConnection, address: str) -> Iterator[CheckFinding]:
    try:
        connection.connect()
        socket = connection.sock
        assert isinstance(socket, ssl.SSLSocket)
        certificate = x509.load_der_x509_certificate(socket.getpeercert(binary_form=True) or b"")
        yield _check_certificate_dates(f"the certificate of {address}", certificate, RENEWAL_HINT)
        connection.request("GET", "/")
        date = connection.getresponse().headers["Date"]
    except ssl.SSLCertVerificationError as error:
        fault, cure = error.verify_message.rstrip("."), CERTIFICATE_HINTS.get(error.verify_code)
        if cure is None:
            yield CheckFinding(
                "refused",
                f"{address} does not have the server certificate in ca.crt: {fault}. Get "
                "ca.crt from the server, or ask the server's administrator",
            )
        else:
            yield CheckFinding("refused", f"the certificate of {address}: {fault}; {cure}")
    except (OSError, HTTPException) as error:
        yield CheckFinding(
            "refused", f"the server {address} cannot be reached over TLS: {error}. Check the address and the firewall"
        )
    else:
        yield _check_clock(date)
    finally:
        connection.close()


def _check_clock(date: str | None) -> CheckFinding:
    if date is None:
        return CheckFinding("note", "clock: the server does not send its time")
    fault = clock_fault(date)
    if fault is not None:
        return CheckFinding("refused", f"{fault}. Synchronize the clock with NTP")
    return CheckFinding("ok", "clock: matches the server's clock")
