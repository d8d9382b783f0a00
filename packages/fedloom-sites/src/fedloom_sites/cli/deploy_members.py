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
    days: Annotated[int, typer.Option(help="validity of the certificate, in days")] = 365,
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
                "an earlier renewal was interrupted. Its files are removed, and certificate and key are "
                "made again together"
            )
        say(
            f"copy {new} and its key to the server, reload the reverse proxy (nginx -s reload) and "
            "restart the superlink's unit, which uses the old certificate too. A run survives that"
        )


@deploy.command()
def add(
    directory: Directory,
    name: Annotated[str, typer.Argument(help="name of the new site", show_default=False)],
    home: Annotated[Path, typer.Option(help="folder for server/ and site/ on the machines")] = Path("/srv/fedloom"),
    programs: Annotated[Path, typer.Option(help="folder of the programs on the machines")] = Path("/opt/fedloom/bin"),
) -> None:
    """Let a site join a deployment that has run.

    A new agreement begins from the last round's model. Every site approves it for itself.

    Example: fedloom deploy add hospitals fichte
    """
    with errors():
        from fedloom_sites.deploy.ops.directory import Location
        from fedloom_sites.deploy.ops.members import add as add_member

        change = add_member(directory, name, Location(home=home, programs=programs))
        say(f"{change.folder}: a new agreement; digest {change.digest}")
        say(f"keys of {name}: SHA-256 {change.keys}. Send both to every site by another way than this folder")
        say(
            f"1. {change.folder / 'approval'} to every site. At the site: fedloom deploy approve SITE "
            "FOLDER --digest DIGEST"
        )
        say(f"2. {change.folder / 'site'} to {name}, as its site folder")
        say(f"3. {change.folder / 'server'} over the server's folder. Let nodes/{name}.pub in. Run the experiment")


@deploy.command()
def approve(
    site: SiteFolder,
    change: Annotated[
        Path | None, typer.Argument(help="folder 'approval' of a new agreement (default: the run of site.toml)")
    ] = None,
    digest: Annotated[str, typer.Option(help="digest of the run, given by its coordinator")] = "",
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
        say("to approve, repeat the command with --digest and the digest that the coordinator gave you")


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
        say(f"{name} is out: {len(server.sites)} sites, quorum {server.quorum}. Its key: fedloom deploy revoke")


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
