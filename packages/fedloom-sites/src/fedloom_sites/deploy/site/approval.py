"""Approval of a run at a site, by the digest of all that is agreed on. Where it is asked for, nothing trains before."""

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
    """Approve the run of a site's settings. The file that records it.

    Raises:
        ConfigError: the digest is of another run.
    """
    check_approved_digest(site, digest)
    path = site.folder / APPROVAL_FILE
    make_folder(path.parent)
    time = datetime.now(UTC).isoformat(timespec="seconds")
    write_atomic(path, json.dumps({"digest": site.digest, "time": time}).encode())
    return path


def check_approved_digest(site: Site, digest: str) -> None:
    """Refuse a digest other than the digest of the site's settings.

    Raises:
        ConfigError: both are named.
    """
    if digest != site.digest:
        raise ConfigError(f"the digest of the run is {site.digest}, got {digest}; ask those who sent it to you")


def check_approved(site: Site) -> None:
    """Refuse to take part in a run that was not approved, where the site's settings ask for it.

    Raises:
        Refused: it was not, or all that is agreed on is not what was approved.
    """
    if not site.approval:
        return
    try:
        approved = json.loads(regular(site.folder / APPROVAL_FILE).read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        approved = None
    if approved != site.digest:
        raise Refused(
            f"site {site.site} has not approved run {site.digest[:16]}; "
            "there: fedloom deploy approve FOLDER --digest DIGEST"
        )
