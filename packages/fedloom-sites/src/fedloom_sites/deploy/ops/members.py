"""Sites that join or leave a deployment after its start.

A site that joins later needs a new agreement, whose fingerprint contains the digest of all members' keys. The new
agreement starts from the last round's model. A site keeps the previous agreement until it has approved the new one
(`accept_agreement`), and answers messages only under the agreement that it keeps. Therefore, if a server adds sites
without approval, all of its messages are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tomli_w
from safetensors.torch import save

from fedloom.errors import ConfigError, RunDirError
from fedloom.storage import lock, make_folder, read_toml, write_atomic
from fedloom.storage.disk import check_regular_file
from fedloom.storage.files import read_content
from fedloom.storage.toml_files import parse_document
from fedloom.values import fields_of, make
from fedloom_sites.deploy.code import CODE_FOLDER, INITIAL_MODEL_FILE
from fedloom_sites.deploy.ops import keys
from fedloom_sites.deploy.ops.directory import SECRET_FILES, Location, site_files, write_files, write_side
from fedloom_sites.deploy.ops.plan import data_table_for_new_site
from fedloom_sites.deploy.ops.status import server_file
from fedloom_sites.deploy.protocol.identity import public_key_line, public_key_path
from fedloom_sites.deploy.secure.opened import read_checked
from fedloom_sites.deploy.secure.pending import PendingSums
from fedloom_sites.deploy.secure.protocol import safe_threshold
from fedloom_sites.deploy.secure.stages import Stage, read_progress
from fedloom_sites.deploy.server.run import last_round
from fedloom_sites.deploy.setting_files import read_server, read_site, sha256_hex
from fedloom_sites.deploy.settings import (
    Member,
    SecureSettings,
    Server,
    SharedSettings,
    Site,
    check_own_keys,
    find_case_twin,
)
from fedloom_sites.deploy.site.approval import check_approved_digest
from fedloom_sites.deploy.site.ledger import LEDGER_FILE as LEDGER

AGREEMENT_FILE = "agreement.json"
FIXED_FIELDS = (
    *("name", "version", "samples", "fixed_data", "models_per_round", "models_in_run", "code", "installed"),
    "data_name",
)
"""Fields of an agreement that stay the same when a member joins."""
KEY_FILES = ("node-key", "node-key.pub", "signing-key")
"""Files of a site's keys in the folder of an amendment."""


class AgreementChange(NamedTuple):
    """New agreement: its folder, its digest, and the SHA-256 of the new member's keys."""

    folder: Path
    digest: str
    keys: str


def keys_digest(members: Sequence[Member]) -> str:
    """Return the SHA-256 of the names, numbers and public keys of sites."""
    lines = [f"{m.client} {m.site} {m.node_key} {m.signing_key}\n" for m in members]
    return sha256_hex("".join(lines).encode())


def add(folder: Path, name: str, place: Location) -> AgreementChange:
    """Create an agreement that includes a new site, with folders for the server, the new site and the approval.

    Return it.

    Args:
        folder: folder of the deployment or of its server. Only its new subfolder ``changes/NAME`` is written to.
        name: name of the new site.
        place: where the new site's files are located. Its host is the server's host.

    Raises:
        ConfigError: the site or the change already exists, the sites share the data of one partition, or the run has no
            global model.
        CheckpointError: no checkpoint can be read.
        RunDirError: a run or a secure session is in progress.
    """
    file = server_file(folder)
    server, out = read_server(file), folder / "changes" / name
    if same := find_case_twin(name, (m.site for m in server.sites)):
        raise ConfigError(
            f"{folder} already has a site {same}, got {name}. Choose a name that does not differ only in capitalization"
        )
    if out.exists():
        raise ConfigError(f"{out} already exists and contains keys. Use this folder, or delete it yourself")
    templates = [read_toml(path, "site file") for path in sorted(folder.glob("sites/*/site.toml"))]
    if any(site.get("share", "all") == "partition" for site in templates):
        raise ConfigError(
            "the sites share the data of one partition, and an additional site would change the "
            "partition. A site can be added only if all sites have their own data. Create a "
            "deployment of all sites with: fedloom deploy init FILE --out NEW --own-data"
        )
    pairs = keys.make_key_pair("connection"), keys.make_key_pair("signing")
    member = make(
        Member,
        {"site": name, "client": server.clients, "node_key": pairs[0].public, "signing_key": pairs[1].public},
        "fedloom deploy add", Member.model_fields,
    )  # fmt: skip
    members = (*server.sites, member)
    check_idle(server)  # creates a lock file, so the name is checked first
    document, (done, start) = read_toml(server.experiment, "experiment file"), _last_round_model(server)
    method = document["method"][0]
    method["rounds"] = max(1, int(method.get("rounds", document.get("rounds", 1))) - done)
    number = 2 + sum(f.name == AGREEMENT_FILE for f in folder.glob(f"changes/*/approval/{AGREEMENT_FILE}"))
    header = f"# agreement {number}, after {server.fingerprint}; members: SHA-256 {keys_digest(members)}\n"
    experiment = (header + tomli_w.dumps(document)).encode()
    settings = read_toml(file, "server file")
    new = {"clients": server.clients + 1, "fingerprint": sha256_hex(experiment)}
    if start is not None:
        new["start"] = sha256_hex(start)
    if server.secure is not None:
        n, before = server.clients + 1, server.secure
        threshold = max(before.threshold, safe_threshold(n))
        names = (*before.names, name) if before.names else ()
        secure = before.with_(threshold=threshold, keys=(*before.keys, member.signing_key), names=names)
        new["secure"] = secure.model_dump(mode="json", exclude_none=True)
        settings["quorum"] = max(settings["quorum"], threshold)
    state = f"state/agreement-{number}"
    settings |= new | {"sites": [m.model_dump(mode="json") for m in members]}
    settings |= {"checkpoints": f"{state}/checkpoints", "audit": f"{state}/audit.jsonl"}
    settings |= {"results": f"results/agreement-{number}"}
    agreed = make(Server, settings, "fedloom deploy add", fields_of(Server))
    shared = {field: getattr(agreed, field) for field in SharedSettings.model_fields}
    data = data_table_for_new_site(templates[0]["data"]) if templates else document["data"]
    about = {"site": name, "client": member.client, "data": data, "server": server.public_address}
    about |= {} if place.memory is None else {"memory": place.memory}
    site = make(Site, {**shared, **about}, name, fields_of(Site))
    common: dict[str, str | bytes] = {
        "experiment.toml": experiment,
        **({} if start is None else {INITIAL_MODEL_FILE: start}),
    }
    code: dict[str, str | bytes] = {
        f"{CODE_FOLDER}/{path}": read_content(file.parent / CODE_FOLDER / path) for path in server.code
    }
    proposal = {
        "before": server.fingerprint,
        "shared": agreed.model_dump(mode="json", include={*SharedSettings.model_fields}, exclude_none=True),
        "members": [m.model_dump(mode="json") for m in members],
    }
    files: dict[str, str | bytes] = {
        **site_files(site, *pairs, place.with_(host=server.host)),
        **common,
        **code,
        "ca.crt": read_content(server.ca),
    }
    write_files(
        out / "server", {**common, "server.toml": tomli_w.dumps(settings), f"nodes/{name}.pub": member.node_key}
    )
    write_side(out / "site", "site", files)
    write_files(out / "approval", {**common, AGREEMENT_FILE: json.dumps(proposal, indent=1)})
    return AgreementChange(out, agreed.digest, keys_digest([member]))


class AgreementProposal(NamedTuple):
    """A new agreement as a site would store it, built from the bytes that were checked.

    Attributes:
        site: settings of the site under the new agreement.
        new_members: members that the site does not yet know.
        files: contents of the files that accompany the agreement, keyed by name.
    """

    site: Site
    new_members: list[Member]
    files: dict[str, bytes]


def check_proposal(folder: Path, change: Path) -> AgreementProposal:
    """Check a new agreement, and return it as the site would store it.

    Args:
        folder: folder of the site.
        change: folder of the new agreement (``approval`` of a change).

    Raises:
        ConfigError: the agreement is for other sites, or changes more than the members, the remaining rounds and the
            initial model, or, if the members are the same, more than the patch release and one site's keys.
        RunDirError: a secure session is in progress.
    """
    site = read_site(folder / "site.toml")
    if not (change / AGREEMENT_FILE).is_file():
        raise ConfigError(
            f"{change} contains no new agreement ({AGREEMENT_FILE}). Name the folder 'approval' of the change or, at "
            "the site that gets new keys, its folder 'site'"
        )
    try:
        proposal = json.loads(check_regular_file(change / AGREEMENT_FILE).read_bytes())
        experiment = check_regular_file(change / "experiment.toml").read_bytes()
        members, former = [Member(**m) for m in proposal["members"]], proposal["before"]
        for kind in ("node_key", "signing_key"):
            check_own_keys(kind, {m.site: getattr(m, kind) for m in members})
        foreign = {*proposal["shared"]} - {*SharedSettings.model_fields}
        settings = read_toml(folder / "site.toml", "site file") | proposal["shared"] | {"experiment": "experiment.toml"}
        new = make(Site, settings, str(change / AGREEMENT_FILE), fields_of(Site))
        document = parse_document(experiment, change / "experiment.toml")
        before = read_toml(site.experiment, "experiment file")
        rounds = [int(d["method"][0].pop("rounds", d.get("rounds", 0))) for d in (document, before)]
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        sentence = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"{change} contains no new agreement: {sentence}") from None
    files = {"experiment.toml": experiment}
    rules = {
        f"it changes settings that belong to the site ({', '.join(sorted(foreign))})": not foreign,
        "it is not a change of this site's agreement": site.fingerprint in (former, new.fingerprint),
        "the experiment file has changed": sha256_hex(experiment) == new.fingerprint,
        "the experiment changes": document == before and rounds[0] <= rounds[1],
    }
    if new.fingerprint == site.fingerprint and new.clients == site.clients:
        files |= {name: read_content(change / name) for name in KEY_FILES if (change / name).exists()}
        if "signing-key" in files:
            files["signing-key.pub"] = f"{public_key_line(files['signing-key'])}\n".encode()
        rules |= _amendment_conditions(site, new, members, files.get("signing-key"))
    else:
        files |= {} if new.start is None else {INITIAL_MODEL_FILE: read_content(change / INITIAL_MODEL_FILE)}
        start = sha256_hex(files[INITIAL_MODEL_FILE]) if INITIAL_MODEL_FILE in files else None
        header = experiment.partition(b"\n")[0].decode(errors="replace")
        rules |= {
            "the experiment file names other members": header.endswith(keys_digest(members)),
            "the agreement changes": all(getattr(new, f) == getattr(site, f) for f in FIXED_FIELDS),
            "the change does not add exactly one member": [m.client for m in members][-1:] == [new.clients - 1]
            and new.clients == site.clients + 1,
            "the keys or the threshold of secure aggregation change": _keeps_secure_sites(
                site.secure, new.secure, members
            ),
            "the initial model has changed": start == new.start,
            "the sites share the data of one partition": site.share == "all",
        }
    wrong = [what for what, holds in rules.items() if not holds]
    if wrong:
        raise ConfigError(f"{change} cannot be approved: {'; '.join(wrong)}")
    record = read_checked(site.folder / "session" / "session.json") or {}
    if read_progress(record).stage in (Stage.MASKED, Stage.AGREED):
        raise RunDirError("a secure session is still running here. Wait until its round has ended, then approve")
    files["site.toml"] = tomli_w.dumps(settings).encode()
    return AgreementProposal(new, [m for m in members if m.client >= site.clients], files)


def accept_agreement(folder: Path, change: Path, digest: str) -> Site:
    """Approve a new agreement at a site, and return the site's new settings.

    The site then answers only messages under this agreement.

    Raises:
        ConfigError: the digest does not match the new agreement, or `check_proposal` raises this error.
        RunDirError: a secure session is in progress.
    """
    before = read_site(folder / "site.toml")
    new, _, files = check_proposal(folder, change)
    check_approved_digest(new, digest)
    ledger, later = before.folder / LEDGER, before.with_(fingerprint=new.fingerprint).folder
    if ledger.exists():  # earlier releases still count
        make_folder(later)
        write_atomic(later / LEDGER, read_content(ledger))
    for name in sorted(files, key=lambda name: name == "site.toml"):  # site.toml last, because it takes effect
        private = {"node-key": before.node_key, "signing-key": before.signing_key}.get(name.removesuffix(".pub"))
        path = folder / name if private is None else public_key_path(private) if name.endswith(".pub") else private
        write_atomic(path, files[name])
        if name in SECRET_FILES:
            path.chmod(0o600)
    return read_site(folder / "site.toml")


def remove(folder: Path, name: str) -> Server:
    """Remove a site from the server's settings, and return the settings.

    Under secure aggregation, the agreed keys are kept.

    Raises:
        ConfigError: the site does not exist, or too few sites remain.
        RunDirError: a run is in progress.
    """
    file = server_file(folder)
    server, settings = read_server(file), read_toml(file, "server file")
    find_member(server, name)
    check_idle(server)
    rest = [m for m in settings["sites"] if m["site"] != name]
    least = 1 if server.secure is None else server.secure.threshold
    if len(rest) < least:
        raise ConfigError(f"without {name}, only {len(rest)} sites would remain, but a run needs {least} sites")
    settings |= {"sites": rest, "quorum": min(settings["quorum"], len(rest))}
    make(Server, settings, str(file), fields_of(Server))
    write_atomic(file, tomli_w.dumps(settings).encode())
    return read_server(file)


def find_member(server: Server, name: str) -> Member:
    """Return a site from the server's settings.

    Raises:
        ConfigError: no site has this name.
    """
    for member in server.sites:
        if member.site == name:
            return member
    raise ConfigError(f"no site is called {name}; sites: {', '.join(m.site for m in server.sites)}")


def check_idle(server: Server) -> None:
    """Raise an error if a run is in progress, or if shares were requested for a masked sum that is still open.

    Raises:
        RunDirError: a run is in progress, or a masked sum whose shares were requested is still open.
    """
    try:
        with lock(server.checkpoints, wait=0):
            pass
    except RunDirError:
        raise RunDirError(
            "a run is in progress. Wait until the run ends, or stop the run, then change its members"
        ) from None
    pending = [PendingSums(server.checkpoints).newest(what) for what in ("uploads", "scores")]
    for one in pending if server.secure is not None else ():
        if one is not None and not one.told and one.attempts:
            raise RunDirError(
                f"a secure session is in progress: the sum of round {one.round} was requested and is "
                "not decrypted yet. Let the server finish the session first"
            )


def is_patch_of(version: str, agreed: str) -> bool:
    """Return True if two versions of fedloom differ only in the last of their three numbers."""
    return version.split(".")[:2] == agreed.split(".")[:2] and len(version.split(".")) == len(agreed.split(".")) == 3


def _amendment_conditions(site: Site, new: Site, members: Sequence[Member], key: bytes | None) -> dict[str, bool]:
    """Return the conditions for an agreement with the same members, keyed by the sentence that describes a violation.

    Args:
        site: the site's settings.
        new: its settings under the new agreement.
        members: the new agreement's sites.
        key: new private signing key of the site, if the folder of the agreement contains one.
    """
    agreed, before, after = (
        {*SharedSettings.model_fields} - {"version", "experiment", "secure"},
        site.secure,
        new.secure,
    )
    keeps, listed = before is after, [m.signing_key for m in members if m.client == site.client]
    if before is not None and after is not None:
        changed = sum(one != other for one, other in zip(before.keys, after.keys, strict=False))
        keeps = changed <= 1 and after.with_(keys=before.keys) == before
        keeps &= all(after.keys[m.client] == m.signing_key for m in members)
    private = read_content(site.signing_key, "the signing key") if key is None else key
    return {
        "the release is not a patch release of the agreed release": is_patch_of(new.version, site.version),
        "the agreement changes": all(getattr(new, f) == getattr(site, f) for f in agreed),
        "secure aggregation changes in more than the keys of one site": keeps,
        "the agreement names a different signing key for this site. Take the folder with the site's new keys": listed
        in ([], [public_key_line(private)]),
    }


def _keeps_secure_sites(before: SecureSettings | None, new: SecureSettings | None, members: Sequence[Member]) -> bool:
    """Return True if secure aggregation covers the same sites and the new one, with at least the same threshold."""
    if before is None or new is None:
        return before is new
    grown = new.keys == (*before.keys, members[-1].signing_key) and new.threshold >= before.threshold
    grown &= new.names == ((*before.names, members[-1].site) if before.names else ())
    kept = ("scores", "norm_bound", "max_share", "changes", "steady", "verify")
    return grown and all(getattr(new, name) == getattr(before, name) for name in kept)


def _last_round_model(server: Server) -> tuple[int, bytes | None]:
    """Return the number of finished rounds, and the model after them as a file of initial values.

    If no round has been completed, the file contains the agreed initial model, or is None. Both come from the same
    checkpoint, because the results are from the last evaluation, which may be many rounds earlier.
    """
    done, model = last_round(server)
    if model is not None:
        return done, save(model)
    return 0, None if server.start is None else read_content(server.experiment.parent / INITIAL_MODEL_FILE)
