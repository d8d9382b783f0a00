"""``fedloom deploy`` between two runs: sites that join, approve or leave, and the server's certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.lab.cli import errors, say
from fedloom_sites.cli.deploy import Directory, SiteFolder, deploy


@deploy.command()
def renew(
    directory: Directory,
    host: Annotated[
        str | None,
        typer.Option(help="host name or address at which sites reach the server (default: as in server.toml)"),
    ] = None,
    days: Annotated[int, typer.Option(help="how long the certificate is valid, in days")] = 365,
) -> None:
    """Make another certificate of the server.

    The same authority signs it. Sites need no new file.

    Example: fedloom deploy renew hospitals
    """
    with errors():
        from fedloom_sites.deploy.ops.directory import renew as renew_certificate

        new, again = renew_certificate(directory, host, days)
        if again:
            say(
                "an earlier renewal was interrupted. Its files were removed, and the certificate and "
                "key are being created again"
            )
        say(
            f"copy {new} and its key to the server, reload the reverse proxy (nginx -s reload) and "
            "restart the superlink's unit, which still uses the old certificate. A run continues "
            "after the restart"
        )


@deploy.command()
def add(
    directory: Directory,
    name: Annotated[str, typer.Argument(help="name of the new site", show_default=False)],
    home: Annotated[
        Path | None, typer.Option(help="folder for server/ and site/ on the machines (default: as in the deployment)")
    ] = None,
    programs: Annotated[
        Path | None, typer.Option(help="folder of the programs on the machines (default: as in the deployment)")
    ] = None,
) -> None:
    """Let a site join a deployment that has run.

    A new agreement begins from the last round's model. Every site approves it for itself.

    Example: fedloom deploy add hospitals fichte
    """
    with errors():
        from fedloom_sites.deploy.ops.directory import Location, machine_folders
        from fedloom_sites.deploy.ops.members import add as add_member
        from fedloom_sites.deploy.ops.status import server_file

        chosen = {key: path for key, path in (("home", home), ("programs", programs)) if path is not None}
        place = Location.model_validate(machine_folders(server_file(directory).parent) | chosen)
        change = add_member(directory, name, place)
        say(f"{change.folder}: a new agreement; digest {change.digest}")
        say(
            f"keys of {name}: SHA-256 {change.keys}. Send this digest and the digest above to every site "
            "through a channel other than this folder"
        )
        say(
            f"1. Send {change.folder / 'approval'} to every site. Every site then runs: fedloom "
            "deploy approve SITE FOLDER --digest DIGEST"
        )
        say(f"2. Send {change.folder / 'site'} to {name}. It is the site folder of {name}")
        say(f"3. Copy {change.folder / 'server'} over the server's folder. Admit nodes/{name}.pub. Run the experiment")


@deploy.command()
def upgrade(directory: Directory) -> None:
    """Agree on the installed patch release in a running experiment.

    Checkpoints and the sites' state stay. Every site installs the release and approves the new agreement.

    Example: fedloom deploy upgrade hospitals
    """
    with errors():
        from fedloom_sites.deploy.ops.amend import upgrade as upgrade_release

        _say_amendment(upgrade_release(directory))


@deploy.command()
def rotate(
    directory: Directory, name: Annotated[str, typer.Argument(help="name of the site", show_default=False)]
) -> None:
    """Give a site new keys within a running experiment.

    The site's state and its memory of sums and budgets stay. Under secure aggregation every site approves.

    Example: fedloom deploy rotate hospitals birke
    """
    with errors():
        from fedloom_sites.deploy.ops.amend import rotate as rotate_keys

        change = rotate_keys(directory, name)
        _say_amendment(change)
        say(f"new keys of {name}: SHA-256 {change.keys}")
        say(
            f"3. Send {change.folder / 'site'} only to {name}, through a secure channel, instead of step "
            "1; then start the site again"
        )
        say(
            f"4. On the server, before step 2: fedloom deploy revoke DIRECTORY {name}; after step 2, "
            f"admit nodes/{name}.pub"
        )


def _say_amendment(change: Any) -> None:
    say(
        f"{change.folder}: an amended agreement; digest {change.digest}. Send this digest through a "
        "channel other than this folder"
    )
    say(
        f"1. Send {change.folder / 'approval'} to every site. Every site then runs: fedloom deploy "
        "approve SITE FOLDER --digest DIGEST"
    )
    say(f"2. Copy {change.folder / 'server'} over the server's folder; start the run again, and the run resumes")


@deploy.command()
def approve(
    site: SiteFolder,
    change: Annotated[
        Path | None, typer.Argument(help="the 'approval' folder of a new agreement (default: the run in site.toml)")
    ] = None,
    digest: Annotated[str, typer.Option(help="digest of the run, which its coordinator sends you")] = "",
) -> None:
    """Approve a run or a new agreement at a site.

    The digest names the run or the agreement, and without --digest the command shows it.

    Example: fedloom deploy approve /srv/fedloom/site --digest 3f2a...
    """
    with errors():
        from fedloom_sites.deploy.ops.members import keys_digest, proposed, take
        from fedloom_sites.deploy.settings import read_site
        from fedloom_sites.deploy.site.approval import approve as approve_run

        members = list[Any]()
        if change is None:
            agreed = read_site(site / "site.toml")
        else:
            agreed, members, _ = proposed(site, change)
        if digest:
            agreed = agreed if change is None else take(site, change, digest)
            approve_run(agreed, digest)
            say(f"approved: run {agreed.digest[:16]} of {agreed.name}, {agreed.clients} sites")
            return
        say(f"{agreed.name}: {agreed.clients} sites, fingerprint {agreed.fingerprint[:16]}..., digest {agreed.digest}")
        for member in members:
            say(f"new: {member.site}, keys SHA-256 {keys_digest([member])}")
        say("to approve, repeat the command with --digest and the digest that the coordinator sent you")


@deploy.command()
def snapshot(
    site: SiteFolder,
    date: Annotated[str | None, typer.Option(help="date of the data, such as 2026-12-01 (default: today)")] = None,
) -> None:
    """Declare a dated snapshot of a site's data that grow.

    The run of this experiment reads the snapshot, unless it has begun with other data.

    Example: fedloom deploy snapshot /srv/fedloom/site
    """
    with errors():
        from fedloom_sites.deploy.snapshots import declare

        new = declare(site, date)
        say(f"snapshot of {new.day}: {new.subjects} subjects, {new.path}")
        later = "the run has begun with other data and keeps them; the next experiment on these data may read it"
        say("this experiment reads this snapshot" if new.used else later)


@deploy.command()
def remove(
    directory: Directory, name: Annotated[str, typer.Argument(help="name of the site", show_default=False)]
) -> None:
    """Take a site out of the server's settings.

    This is done between two runs. The site's key stays registered.

    Example: fedloom deploy remove /srv/fedloom/server dorn
    """
    with errors():
        from fedloom_sites.deploy.ops.members import remove as remove_member

        server = remove_member(directory, name)
        say(
            f"{name} no longer takes part: {len(server.sites)} sites, quorum {server.quorum}. To revoke "
            "its key: fedloom deploy revoke"
        )


@deploy.command()
def revoke(
    directory: Directory, name: Annotated[str, typer.Argument(help="name of the site", show_default=False)]
) -> None:
    """Revoke the key of a site on the running server.

    The server no longer admits its node.

    Example: fedloom deploy revoke /srv/fedloom/server dorn
    """
    with errors():
        from fedloom_sites.deploy.ops.admitted import revoke as revoke_key

        say(f"node {revoke_key(directory, name)} of {name} can no longer connect")
