"""Amendments of an agreement within an experiment: a patch release of fedloom, or new keys for a site.

Neither the experiment file nor its fingerprint changes. Checkpoints, the sites' states and models, and their records of
sums and budgets are therefore kept. Every site approves an amendment by its digest (`take`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.errors import ConfigError
from fedloom.storage import read_toml
from fedloom.storage.files import read_content
from fedloom.values import fields_of, make
from fedloom.version import __version__
from fedloom_sites.deploy.ops import keys
from fedloom_sites.deploy.ops.admitted import ADMITTED_SUFFIX, KEYS_FOLDER
from fedloom_sites.deploy.ops.directory import FileContents, write_files
from fedloom_sites.deploy.ops.members import (
    AGREEMENT_FILE,
    AgreementChange,
    check_idle,
    find_member,
    is_patch_of,
    keys_digest,
)
from fedloom_sites.deploy.ops.status import server_file
from fedloom_sites.deploy.relay import LINKS_FILE, RELAYED_FOLDER
from fedloom_sites.deploy.setting_files import read_server
from fedloom_sites.deploy.settings import Member, Server, SharedSettings


def upgrade(folder: Path) -> AgreementChange:
    """Create and return an agreement on the same experiment that names the installed patch release of fedloom.

    Args:
        folder: folder of the deployment or of its server. Only its subfolder ``changes/release-VERSION`` is written.

    Raises:
        ConfigError: the installed release is not a different patch release of the same version, or the change already
            exists.
        RunDirError: a run or a secure session is in progress.
    """
    server = read_server(server_file(folder))
    if __version__ == server.version:
        raise ConfigError(
            f"the experiment already runs fedloom {server.version}, which is installed here. Install the new release "
            "first"
        )
    if not is_patch_of(__version__, server.version):
        raise ConfigError(
            f"the experiment runs fedloom {server.version}, but {__version__} is installed. Within an experiment, only "
            "the last part of the version number may change. Install such a release, or start a new experiment"
        )
    return _write_amendment(folder, f"release-{__version__}", {"version": __version__}, server.sites)


def rotate(folder: Path, name: str) -> AgreementChange:
    """Create new keys for a site, and return the agreement that contains them.

    The site keeps its memory, state and number.

    Args:
        folder: folder of the deployment or of its server. Only its subfolder ``changes/keys-NAME`` is written.
        name: name of the site.

    Raises:
        ConfigError: the site does not exist, the change exists already, or the sites verify sums signed with the old
            keys.
        RunDirError: a run or a secure session is in progress.
    """
    server = read_server(server_file(folder))
    before = find_member(server, name)
    if server.verifies and (server.checkpoints / RELAYED_FOLDER / LINKS_FILE).exists():
        raise ConfigError(
            f"the sites verify the sums with verify, and {name} has signed the stored rounds with its old keys, so no "
            "site could open these rounds with the new keys. Start a new deployment: fedloom deploy init"
        )
    node, signing = keys.make_key_pair("connection"), keys.make_key_pair("signing")
    member = before.with_(node_key=node.public, signing_key=signing.public)
    members = tuple(member if one == before else one for one in server.sites)
    shared = dict[str, Any]()
    if server.secure is not None:
        agreed = list(server.secure.keys)
        agreed[member.client] = member.signing_key
        secure = server.secure.with_(keys=tuple(agreed))
        shared = {"secure": secure.model_dump(mode="json", exclude_none=True)}
    files: FileContents = {"node-key": node.private, "node-key.pub": f"{node.public}\n", "signing-key": signing.private}
    change = _write_amendment(folder, f"keys-{name}", shared, members, member, files)
    return change._replace(keys=keys_digest([member]))


def _write_amendment(
    folder: Path, what: str, shared: dict[str, Any], members: Sequence[Member], changed: Member | None = None,
    secrets: FileContents | None = None,
) -> AgreementChange:  # fmt: skip
    """Write the folders of an amendment: for the server, for each site's approval, and for a site with new keys."""
    file = server_file(folder)
    server, out = read_server(file), folder / "changes" / what
    check_idle(server)
    if out.exists():
        raise ConfigError(f"{out} already exists. Use this folder, or delete the folder yourself")
    settings = read_toml(file, "server file") | shared | {"sites": [m.model_dump(mode="json") for m in members]}
    agreed = make(Server, settings, f"fedloom deploy: {what}", fields_of(Server))
    proposal = {
        "before": server.fingerprint,
        "shared": agreed.model_dump(mode="json", include={*SharedSettings.model_fields}, exclude_none=True),
        "members": [m.model_dump(mode="json") for m in members],
    }
    approval: FileContents = {
        "experiment.toml": read_content(server.experiment),
        AGREEMENT_FILE: json.dumps(proposal, indent=1),
    }
    admitted = {} if changed is None else {f"{KEYS_FOLDER}/{changed.site}{ADMITTED_SUFFIX}": f"{changed.node_key}\n"}
    write_files(out / "server", {"server.toml": tomli_w.dumps(settings), **admitted})
    write_files(out / "approval", approval)
    if secrets is not None:
        write_files(out / "site", {**approval, **secrets})
    return AgreementChange(out, agreed.digest, "")
