"""A site's approval of a run, which the digest of all agreed settings identifies, and a check of its data's names.

If approval is required, the site does not train without it. The sender of an agreement names the data, and this
name determines which of its records a site uses for them. A site therefore keeps the name that it first used for each
source of samples.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from fedloom.errors import ConfigError, Refused
from fedloom.storage import make_folder, write_atomic
from fedloom.storage.disk import check_regular_file
from fedloom_sites.deploy.secure.opened import OPENED_FILE, lock_folder, read_checked
from fedloom_sites.deploy.settings import Site

APPROVAL_FILE, NAMES_FILE = "approved.json", "data-names.json"


def approve(site: Site, digest: str) -> Path:
    """Approve the run described in a site's settings, and return the path of the file that records the approval.

    The file contains the digest and the time of the approval.

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
    """Raise an error if a site's settings require approval, but the run was not approved.

    Raises:
        ConfigError: the run was not approved, or the agreed settings differ from the approved ones.
    """
    if not site.approval:
        return
    try:
        approved = json.loads(check_regular_file(site.folder / APPROVAL_FILE).read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        approved = None
    if approved != site.digest:
        raise Refused(
            f"site {site.site} has not approved run {site.digest[:16]}. At the site, run: fedloom "
            "deploy approve FOLDER --digest DIGEST"
        )


def check_data_name(site: Site, *, remembers_answers: bool = False) -> None:
    """Raise an error if an agreement renames data whose sums, budgets or answers the site remembers.

    The first agreement that uses a source determines the source's name. If the site has memories of data without a
    source (from an earlier version of fedloom, or because the list of names was lost), a new source takes one of their
    names.

    Args:
        site: the site's settings.
        remembers_answers: True to also check the name without secure aggregation and epsilon, because the site compares
            analyses or snapshots with earlier ones of the same name.

    Raises:
        ConfigError: the source is registered under a different name at this site, a new name could bypass the record of
            the samples that were used before, or the list of names is damaged.
    """
    if site.snapshot is not None or not (remembers_answers or site.secure is not None or site.epsilon is not None):
        return  # `declare_snapshot` has checked the source of a snapshot
    folder, place = site.memory or site.state, str(site.data.get("path", site.data["source"]))
    if site.memory is not None and not folder.is_dir():
        raise Refused(
            f"the folder memory of site {site.site}, {folder}, does not exist, so the site would forget the sums and "
            "budgets of its data. Restore the folder from a copy or from the site's former machine. If the site has "
            "never taken part in a deployment, create an empty folder"
        )
    source = hashlib.sha256(str(Path(place).resolve() if Path(place).exists() else place).encode()).hexdigest()
    with lock_folder(folder):
        path = folder / NAMES_FILE
        try:
            names = json.loads(check_regular_file(path).read_bytes()) if path.exists() else {}
            orphans = {file.parent.name.removeprefix("data-") for file in folder.glob("data-*/*.json")} - {
                *names.values()
            }
            is_free = source in names or not orphans or site.data_name in orphans
            first_name = names.setdefault(source, site.data_name)
        except (OSError, ValueError, AttributeError, RecursionError):
            raise Refused(
                f"{NAMES_FILE} of site {site.site} is damaged, so the site cannot know the names of its data. Restore "
                f"the file from a copy, or write {{}} into it if the site has not taken part in another experiment"
            ) from None
        line = json.dumps({source: site.data_name}).strip("{}")
        if not is_free:
            raise Refused(
                f"site {site.site} remembers sums or budgets of data named {', '.join(sorted(orphans))}, which may be "
                f"these data, but the agreement calls them {site.data_name!r}. Agree on the earlier name as "
                f"`data_name`. If these are other patients, add {line} to {NAMES_FILE}, which is in the site's folder "
                "`memory`, or in `state` if `memory` is not set"
            )
        if first_name != site.data_name:
            raise Refused(
                f"site {site.site} knows these data under the name {first_name!r}, but the agreement calls them "
                f"{site.data_name!r}, so the site would forget the sums and budgets of these data. Agree on data_name "
                f"= {first_name!r}. If the source now contains other patients, change its line to {line} in "
                f"{NAMES_FILE}, which is in the site's folder `memory`, or in `state` if `memory` is not set"
            )
        if not path.exists() or json.loads(check_regular_file(path).read_bytes()) != names:
            write_atomic(path, (json.dumps(names, indent=1) + "\n").encode())


def count_experiments(site: Site) -> int:
    """Return the number of other experiments on the same data that a site remembers."""
    record = read_checked(site.memory_folder / OPENED_FILE) or {}
    return len({*record.get("experiments", {})} - {site.folder.name})
