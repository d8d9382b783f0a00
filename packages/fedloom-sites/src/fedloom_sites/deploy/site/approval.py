"""Approval of a run at a site, identified by the digest of all agreed settings.

If approval is required, the site does not train before it is given.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from fedloom.errors import ConfigError, Refused
from fedloom.storage import make_folder, write_atomic
from fedloom.storage.disk import regular
from fedloom_sites.deploy.settings import Site

APPROVAL_FILE = "approved.json"


def approve(site: Site, digest: str) -> Path:
    """Approve the run in a site's settings, and return the path of the file that records the approval.

    The file contains the digest and the time.

    Raises:
        ConfigError: the digest belongs to a different run.
    """
    check_approved_digest(site, digest)
    path = site.folder / APPROVAL_FILE
    make_folder(path.parent)
    time = datetime.now(UTC).isoformat(timespec="seconds")
    write_atomic(path, json.dumps({"digest": site.digest, "time": time}).encode())
    return path


def check_approved_digest(site: Site, digest: str) -> None:
    """Raise an error if a digest differs from the digest of the site's settings.

    Raises:
        ConfigError: the digests differ. The message contains both digests.
    """
    if digest != site.digest:
        raise ConfigError(f"the digest of the run is {site.digest}, got {digest}. Ask the person who sent the digest")


def check_approved(site: Site) -> None:
    """Raise an error if a site's settings require approval but the run was not approved.

    Raises:
        ConfigError: the run was not approved, or the agreed settings differ from the approved ones.
    """
    if not site.approval:
        return
    try:
        approved = json.loads(regular(site.folder / APPROVAL_FILE).read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        approved = None
    if approved != site.digest:
        raise Refused(
            f"site {site.site} has not approved run {site.digest[:16]}. At the site, run: fedloom "
            "deploy approve FOLDER --digest DIGEST"
        )
