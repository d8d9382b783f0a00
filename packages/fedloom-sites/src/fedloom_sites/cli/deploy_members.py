"""``fedloom deploy`` commands between two runs: sites that join, approve or leave, and the server's certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.lab.cli import print_errors, say
from fedloom_sites.cli.deploy import Directory, Memory, SiteFolder, deploy


@deploy.command()
def renew(
    directory: Directory,
    host: Annotated[
        str | None,
        typer.Option(help="host name or address at which sites reach the server (default: as in server.toml)"),
    ] = None,
    days: Annotated[int, typer.Option(help="validity of the certificate, in days")] = 365,
) -> None:
    """Renew the server's certificate. Sites do not need a new file.

    Example: fedloom deploy renew hospitals
    """
    with print_errors():
        from fedloom_sites.deploy.ops.directory import renew as renew_certificate

        new, again = renew_certificate(directory, host, days)
        if again:
            say(
                "an earlier renewal was interrupted. Its files were removed, and a new certificate and key are being "
                "created"
            )
        say(
            f"copy {new} and its key to the server, reload the reverse proxy (nginx -s reload) and restart the "
            "superlink's unit, which still uses the old certificate. A run continues after the restart"
        )


@deploy.command()
def add(
    directory: Directory,
    name: Annotated[str, typer.Argument(help="name of the new site", show_default=False)],
    home: Annotated[
        Path | None, typer.Option(help="folder on each machine for server/ or site/ (default: as in the deployment)")
    ] = None,
    programs: Annotated[
        Path | None, typer.Option(help="folder on each machine for the programs (default: as in the deployment)")
    ] = None,
    memory: Memory = None,
) -> None:
    """Add a site to a deployment that has already run.

    The new agreement starts from the last round's model and must be approved by every site.

    Example: fedloom deploy add hospitals fichte
    """
    with print_errors():
        from fedloom_sites.deploy.ops.members import add as add_member

        folders = {"home": home, "programs": programs, "memory": memory}
        chosen = {key: path for key, path in folders.items() if path is not None}
        place = _deployment_location(directory).with_(**chosen)
        change = add_member(directory, name, place)
        say(f"{change.folder}: a new agreement; digest {change.digest}")
        say(
            f"keys of {name}: SHA-256 {change.keys}. Send both digests to every site through a channel other than "
            "this folder"
        )
        _print_steps(
            directory, change, place,
            f"Send {change.folder / 'site'} only to {name}, through a secure channel. There it becomes "
            f"{place.home / 'site'}, or {directory / 'sites' / name} for a trial on this machine",
            name, resumes=False,
        )  # fmt: skip


@deploy.command()
def upgrade(directory: Directory) -> None:
    """Upgrade a running experiment to the installed patch release.

    Checkpoints and the sites' state are kept. Every site must then install the release and approve the new agreement.

    Example: fedloom deploy upgrade hospitals
    """
    with print_errors():
        from fedloom_sites.deploy.ops.amend import upgrade as upgrade_release

        change = upgrade_release(directory)
        _print_amendment(change)
        _print_steps(
            directory, change, _deployment_location(directory), "Install the release on the server and at every site"
        )


@deploy.command()
def rotate(
    directory: Directory, name: Annotated[str, typer.Argument(help="name of the site", show_default=False)]
) -> None:
    """Replace a site's keys while an experiment is running.

    The site's state and its record of sums and budgets are kept. With secure aggregation, every site must approve.

    Example: fedloom deploy rotate hospitals birke
    """
    with print_errors():
        from fedloom_sites.deploy.ops.amend import rotate as rotate_keys
        from fedloom_sites.deploy.ops.status import find_server

        change, place = rotate_keys(directory, name), _deployment_location(directory)
        masked = find_server(directory).secure is not None
        instead = ", instead of 'approval'" if masked else ""
        _print_amendment(change)
        say(f"new keys of {name}: SHA-256 {change.keys}")
        _print_steps(
            directory, change, place,
            f"Send {change.folder / 'site'} only to {name}, through a secure channel{instead}. There: fedloom "
            f"deploy approve {place.home / 'site'} site --digest DIGEST. Then restart the site. On the running "
            f"server, revoke the old key: fedloom deploy revoke {place.home / 'server'} {name}",
            name, everyone=masked,
        )  # fmt: skip


def _deployment_location(directory: Path) -> Any:
    """Return the location of a deployment's files on its machines."""
    from fedloom_sites.deploy.ops.directory import Location, machine_folders
    from fedloom_sites.deploy.ops.status import server_file

    return Location.model_validate(machine_folders(server_file(directory).parent))


def _print_amendment(change: Any) -> None:
    say(
        f"{change.folder}: an amended agreement; digest {change.digest}. Send this digest through a channel other "
        "than this folder"
    )


def _print_steps(
    directory: Path, change: Any, place: Any, further: str, new_key: str = "", *, resumes: bool = True,
    everyone: bool = True,
) -> None:  # fmt: skip
    """Print the steps for applying a change to an agreement, in order.

    Args:
        directory: folder of the deployment, or of its server.
        change: the change.
        place: where the deployment's files are located on its machines.
        further: step after the approval.
        new_key: name of a site whose key the server does not yet know, or "".
        resumes: True if the next start resumes the same run, which may have been stopped.
        everyone: True if every site must approve the change.
    """
    from fedloom_sites.deploy.ops.directory import CLI_FOLDER
    from fedloom_sites.deploy.ops.status import find_server, server_file
    from fedloom_sites.deploy.server.run import stop_file

    server, here = place.home / "server", server_file(directory).parent
    trial = "" if server == here else f" (for a trial on this machine: {here})"
    flwr = f"FLWR_HOME={server / CLI_FOLDER} {place.programs / 'flwr'}"
    register = f" Then register the key: {flwr} supernode register {server / 'nodes' / new_key}.pub fedloom"
    stopped = resumes and stop_file(find_server(directory)).exists()
    undo = f"fedloom deploy stop {directory} --undo, because the run was stopped. Then start"
    steps = [
        f"Send {change.folder / 'approval'} to every site. There: fedloom deploy approve {place.home / 'site'} "
        "approval --digest DIGEST",
        further,
        f"On the server: cp -r {change.folder / 'server'}/. {server}{trial}.{register if new_key else ''}",
        f"{undo if stopped else 'Start'} the run again, as it was started before",
    ]
    say(*(f"{number}. {step}" for number, step in enumerate(steps[0 if everyone else 1 :], 1)))


@deploy.command()
def approve(
    site: SiteFolder,
    change: Annotated[
        Path | None, typer.Argument(help="a new agreement's 'approval' folder (default: the run in site.toml)")
    ] = None,
    digest: Annotated[str, typer.Option(help="digest of the run, as received from the coordinator")] = "",
) -> None:
    """Approve a run or a new agreement at a site.

    The digest identifies the run or agreement. Without --digest, the command prints it.

    Example: fedloom deploy approve /srv/fedloom/site --digest 3f2a...
    """
    with print_errors():
        from fedloom_sites.deploy.ops.members import accept_agreement, check_proposal, keys_digest
        from fedloom_sites.deploy.setting_files import read_site
        from fedloom_sites.deploy.site.approval import approve as approve_run

        members = list[Any]()
        if change is None:
            agreed = read_site(site / "site.toml")
        else:
            agreed, members, _ = check_proposal(site, change)
        if digest:
            agreed = agreed if change is None else accept_agreement(site, change, digest)
            approve_run(agreed, digest)
            say(f"approved: run {agreed.digest[:16]} of {agreed.name}, {agreed.clients} sites")
            return
        say(f"{agreed.name}: {agreed.clients} sites, fingerprint {agreed.fingerprint[:16]}..., digest {agreed.digest}")
        for member in members:
            say(f"new: {member.site}, keys SHA-256 {keys_digest([member])}")
        say("to approve, repeat the command with --digest and the digest that you received from the coordinator")


@deploy.command()
def snapshot(
    site: SiteFolder,
    date: Annotated[str | None, typer.Option(help="date of the data, such as 2026-12-01 (default: today)")] = None,
) -> None:
    """Declare a dated snapshot of a site's growing data.

    This experiment's run reads the snapshot, unless it has already begun with other data.

    Example: fedloom deploy snapshot /srv/fedloom/site
    """
    with print_errors():
        from fedloom_sites.deploy.snapshots import declare_snapshot

        new = declare_snapshot(site, date)
        say(f"snapshot of {new.day}: {new.subjects} subjects, {new.path}")
        later = "the run has begun with other data, which it keeps. The next experiment on these data can read this one"
        say("this experiment reads this snapshot" if new.used else later)


@deploy.command()
def remove(
    directory: Directory, name: Annotated[str, typer.Argument(help="name of the site", show_default=False)]
) -> None:
    """Remove a site from the server's settings. This is possible only between runs. The site's key remains registered.

    Example: fedloom deploy remove /srv/fedloom/server dorn
    """
    with print_errors():
        from fedloom_sites.deploy.ops.members import remove as remove_member

        server = remove_member(directory, name)
        say(
            f"{name} no longer takes part: {len(server.sites)} sites, quorum {server.quorum}. To revoke "
            f"its key, on the running server: fedloom deploy revoke {directory} {name}"
        )


@deploy.command()
def revoke(
    directory: Directory, name: Annotated[str, typer.Argument(help="name of the site", show_default=False)]
) -> None:
    """Revoke a site's key on the running server. The server then no longer admits the site's node.

    Example: fedloom deploy revoke /srv/fedloom/server dorn
    """
    with print_errors():
        from fedloom_sites.deploy.ops.admitted import revoke as revoke_key

        say(f"node {revoke_key(directory, name)} of {name} can no longer connect")
