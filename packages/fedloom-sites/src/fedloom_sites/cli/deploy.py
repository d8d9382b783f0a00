"""``fedloom deploy``: run an experiment at real sites, with Flower over TLS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.formats import format_significant
from fedloom.lab.cli import (
    DataDir,
    FileArgument,
    StrictCommandGroup,
    Trust,
    add_file_to_errors,
    app,
    choose_analysis,
    print_errors,
    say,
    say_json,
)

if TYPE_CHECKING:
    from fedloom_sites.deploy.ops.directory import Location
    from fedloom_sites.deploy.ops.plan import DeploymentPlan

deploy = typer.Typer(
    cls=StrictCommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run an experiment at real sites with Flower over TLS. Data never leave the sites, only models do.",
)
app.add_typer(deploy, name="deploy", rich_help_panel="Real sites")

FILE_COLUMNS = 120
"""Width of a table, in characters, if it is written to a file or piped to another program."""

Directory = Annotated[Path, typer.Argument(help="directory written by 'fedloom deploy init'", show_default=False)]
SiteFolder = Annotated[Path, typer.Argument(help="a site's folder, which contains site.toml", show_default=False)]
SiteCount = Annotated[int | None, typer.Option(help="number of sites (default: the partition's number of clients)")]
Memory = Annotated[
    Path | None,
    typer.Option(
        help="existing folder on each site's machine for its record of sums and budgets, shared by all of the site's "
        "deployments (default: the site's state folder)"
    ),
]
OwnData = Annotated[
    bool, typer.Option("--own-data", help="use each site's own data instead of a share of the experiment's data")
]
Threshold = Annotated[
    int | None,
    typer.Option(help="minimum number of sites in a masked sum that may be decrypted (default: more than two thirds)"),
]


@deploy.command()
def init(
    file: FileArgument,
    sites: SiteCount = None,
    names: Annotated[
        str | None, typer.Option(help="names of the sites, separated by commas (default: site-0, site-1, ...)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="directory to create (default: named after the file)")] = None,
    method: Annotated[str | None, typer.Option(help="label of the method, if the experiment has several")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="number of communication rounds (default: as in the experiment)", min=1)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the run (default: the experiment's first)", min=0)] = None,
    host: Annotated[str, typer.Option(help="host name or address at which sites reach the server")] = "localhost",
    proxy_port: Annotated[int, typer.Option(help="port at which sites reach the server")] = 8443,
    port: Annotated[int, typer.Option(help="the server's loopback port behind the reverse proxy")] = 18000,
    quorum: Annotated[
        int | None,
        typer.Option(help="number of accepted replies required in each round (default: more than half of the sites)"),
    ] = None,
    norm_bound: Annotated[
        float | None,
        typer.Option(
            help=("maximum norm of accepted updates (default: 10 times the largest norm in a simulated first round)")
        ),
    ] = None,
    most_samples: Annotated[
        int | None,
        typer.Option(
            help=(
                "maximum number of samples that a site may claim for its training, validation or test set (default: "
                "the largest number of any client, or 10^8 with --own-data)"
            ),
            min=1,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="loopback port for Prometheus metrics (default: none)")
    ] = None,
    home: Annotated[Path, typer.Option(help="folder on each machine for server/ or site/")] = Path("/srv/fedloom"),
    programs: Annotated[Path, typer.Option(help="folder on each machine where the programs are installed")] = Path(
        "/opt/fedloom/bin"
    ),
    memory: Memory = None,
    days: Annotated[int, typer.Option(help="validity of the certificates, in days")] = 365,
    own_data: OwnData = False,
    fixed_data: Annotated[
        bool,
        typer.Option(
            "--fixed-data", help="reject a site whose samples change during the run instead of only logging the change"
        ),
    ] = False,
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="send the server only masked sums, never individual uploads")
    ] = False,
    threshold: Threshold = None,
    changes: Annotated[
        int | None,
        typer.Option(
            help="maximum number of times that a site may leave or rejoin the masked sums (default: 4)", min=0
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="let every site open the masked sums itself and train only models that it computes from them",
        ),
    ] = False,
    data_name: Annotated[
        str, typer.Option(help="name of the data set, under which sites record sums and budgets across experiments")
    ] = "data",
    data_dir: DataDir = None,
    trust: Trust = False,
) -> None:
    """Create the directory of a new deployment.

    It contains certificates, keys, settings, systemd units, a reverse-proxy configuration, and the five commands that
    run the deployment.

    Example: fedloom deploy init examples/hospitals.toml --sites 4 --method flame --rounds 10 --out hospitals
    """
    with print_errors():
        from fedloom.lab.experiment import read

        with add_file_to_errors(file):
            experiment = read(file, trust=trust)
        from fedloom.values import make
        from fedloom_sites.deploy.ops.directory import Location
        from fedloom_sites.deploy.ops.plan import plan_deployment

        options = {
            "host": host,
            "proxy_port": proxy_port,
            "port": port,
            "home": home,
            "programs": programs,
            "memory": memory,
            "days": days,
        }
        place = make(
            Location,
            {**options, "quorum": quorum, "metrics_port": metrics_port},
            "fedloom deploy init",
            Location.model_fields,
        )
        choice: dict[str, Any] = {
            "method": method,
            "seed": seed,
            "rounds": rounds,
            "data_dir": data_dir,
            "names": () if names is None else tuple(name.strip() for name in names.split(",")),
            "own_data": own_data,
            "fixed_data": fixed_data,
            "norm_bound": norm_bound,
            "most_samples": most_samples,
            "secure_aggregation": secure_aggregation,
            "threshold": threshold,
            "changes": changes,
            "verify": verify,
            "data_name": data_name,
        }
        _write_directory(plan_deployment(experiment, sites, **choice), out or Path(file.stem), place)


@deploy.command("analyze")
def analyze_sites(
    name: Annotated[
        str, typer.Argument(help="name of a sum-based analysis, from 'fedloom list analyses'", show_default=False)
    ],
    file: FileArgument,
    values: Annotated[
        list[str] | None, typer.Option("--set", help="an option of the analysis, such as width=30 (may be repeated)")
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option("--rule", help="a limit of the analysis, such as min_subjects=5 (may be repeated)"),
    ] = None,
    sites: SiteCount = None,
    names: Annotated[str | None, typer.Option(help="names of the sites, separated by commas")] = None,
    out: Annotated[
        Path | None, typer.Option(help="directory to create (default: named after the file and the analysis)")
    ] = None,
    own_data: OwnData = False,
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="send the server only masked sums")
    ] = False,
    threshold: Threshold = None,
    data_dir: DataDir = None,
    trust: Trust = False,
) -> None:
    """Create the directory of a deployment for one analysis.

    Options are taken from the file's [[analysis]] table of this kind, and can be changed with --set and --rule. The
    file's first method runs for one round before the analysis. To set other deployment options, add the [[analysis]]
    table to the file and use init.

    Example: fedloom deploy analyze table-1 hospitals.toml --own-data --sites 5 --secure-aggregation
    """
    with print_errors():
        from dataclasses import replace

        from fedloom.analyses import require_questions
        from fedloom.lab.experiment import read
        from fedloom.outputs import check_output_folder
        from fedloom_sites.deploy.ops.directory import Location
        from fedloom_sites.deploy.ops.plan import plan_deployment

        folder = check_output_folder(out or Path(f"{file.stem}-{name.rpartition(':')[2]}"))
        with add_file_to_errors(file):
            experiment = read(file, trust=trust)
        analysis, agreed = choose_analysis(experiment, name, values or (), rules or ())
        require_questions(analysis)
        one = replace(experiment, analyses=(analysis.with_(rules=agreed) if rules else analysis,))
        choice: dict[str, Any] = {
            "method": experiment.methods[0].label, "rounds": 1, "data_dir": data_dir, "own_data": own_data,
            "names": () if names is None else tuple(name.strip() for name in names.split(",")),
            "secure_aggregation": secure_aggregation, "threshold": threshold,
        }  # fmt: skip
        _write_directory(plan_deployment(one, sites, **choice), folder, Location())


def _write_directory(planned: DeploymentPlan, folder: Path, place: Location) -> None:
    """Create a deployment's directory, and print a description of it."""
    from fedloom_sites.deploy.ops.directory import write_directory

    write_directory(planned, folder, place)
    say(f"{folder}: a server and {len(planned.sites)} sites ({', '.join(planned.sites)})")
    if planned.norm_bound is not None:
        bound = planned.norm_bound
        text = (
            ", ".join(f"{k} {format_significant(v)}" for k, v in bound.items())
            if isinstance(bound, dict)
            else format_significant(bound)
        )
        say(f"maximum accepted norm of a site's update: norm_bound = {text} in server.toml")
    elif planned.sends:
        say(
            "there is no norm_bound, because the experiment's data are not on this machine. A single site can "
            "therefore change the model arbitrarily. Add --norm-bound"
        )
    if planned.most_samples is None and planned.by_samples:
        say(
            "a site's weight is the number of samples that it claims, up to 10^8. Use --most-samples to limit this "
            "number to the size of the largest site"
        )
    if planned.threshold is not None:
        from fedloom_sites.deploy.secure.protocol import max_colluders

        count = max_colluders(len(planned.sites), planned.threshold)
        say(
            f"secure aggregation: sums of at least {planned.threshold} sites, also for scores. A dishonest server that "
            f"colludes with {count} of the sites learns no upload of another site"
        )
    if planned.code.files:
        say(f"user code, copied to all sites: {', '.join(planned.code.files)}")
    if planned.code.installed:
        say(f"user code, to be installed at all sites: {', '.join(planned.code.installed)}")
    say(f"instructions: {folder / 'README.md'}. To try the deployment on this machine: fedloom deploy local {folder}")


@deploy.command()
def check(
    site: SiteFolder,
    offline: Annotated[bool, typer.Option("--offline", help="skip the check that connects to the server")] = False,
) -> None:
    """Check whether a site is ready to join.

    The command prints one sentence per finding. The exit code is 1 if the site cannot take part.

    Example: fedloom deploy check /srv/fedloom/site
    """
    with print_errors():
        from fedloom_sites.deploy.ops.check import check_site
        from fedloom_sites.deploy.setting_files import read_site

        refused = 0
        for finding in check_site(read_site(site / "site.toml"), offline=offline):
            say(f"{finding.level:<8}{finding.sentence}")
            refused += finding.level == "refused"
        if refused:
            say(f"the site cannot take part: {refused} of the findings must be fixed first", err=True)
            raise typer.Exit(1)


@deploy.command("rehearse")
def rehearse_attacks(
    site: SiteFolder, as_json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False
) -> None:
    """Attack a copy of a site to see what a server could learn.

    A simulated dishonest server tries all known attacks, and the table shows what it learned. The exit code is 1 if the
    server learned something about this site that it should not learn (OPEN). Nothing leaves the machine, and the site's
    files are not changed.

    Example: fedloom deploy rehearse /srv/fedloom/site
    """
    with print_errors():
        from fedloom.lab.printing import print_texts
        from fedloom_sites.deploy.rehearsal.rehearse import rehearse_attacks as play
        from fedloom_sites.deploy.setting_files import read_site

        settings = read_site(site / "site.toml")
        rows = [row.as_record() for row in play(settings)]
        opened = [row["attack"] for row in rows if row["verdict"] == "OPEN"]
        if as_json:
            say_json({"site": settings.site, "open": opened, "attacks": rows})
        else:
            columns = ("attack", "verdict", "tried", "learned", "rule")
            titles = (
                "attack",
                "verdict",
                "the server tried",
                "it learned",
                "rule that stopped it, or remaining risk",
            )
            print_texts(titles, ([row[column] for column in columns] for row in rows), width=FILE_COLUMNS, names=True)
        if opened:
            say(f"{len(opened)} of {len(rows)} attacks are OPEN: {', '.join(opened)}", err=True)
            raise typer.Exit(1)


@deploy.command()
def local(
    directory: Directory,
    port: Annotated[int | None, typer.Option(help="the server's port (default: a free port)", min=1, max=65535)] = None,
) -> None:
    """Run an entire deployment on this machine.

    The command starts the server (with TLS and node keys) and all sites, and runs all rounds. To resume, run the same
    command again.

    Example: fedloom deploy local hospitals
    """
    with print_errors():
        from fedloom.errors import EXIT_CODES, Stop
        from fedloom_sites.deploy.ops.loopback import run_all
        from fedloom_sites.deploy.ops.processes import ProcessError
        from fedloom_sites.deploy.ops.status import read_status, status_lines
        from fedloom_sites.deploy.server.run import finished_reason

        try:
            deployment = run_all(directory, say, port)
        except KeyboardInterrupt:
            say("interrupted. Every process has ended. Run the same command again to continue", err=True)
            raise typer.Exit(EXIT_CODES[Stop.INTERRUPTED.status]) from None
        except ProcessError as error:
            say(f"error: {error}", err=True)
            raise typer.Exit(EXIT_CODES[error.stop.status]) from None
        rows = deployment.table()
        if rows:
            from fedloom.lab.printing import print_rows

            print_rows(rows, ("site", "model", "round"), width=FILE_COLUMNS)
        else:  # the server does not receive individual sites' scores: print the means, or that there are no scores
            say(*status_lines(read_status(deployment.server)))
        say(f"results of the server: {deployment.server.results}")
        for site in deployment.sites.values():
            say(f"models of {site.site}: {site.state}")
        ended, shown = finished_reason(deployment.server) or Stop.FAILED, read_status(deployment.server)
        if ended is not Stop.DONE:
            say(f"{shown['state']}: {shown['reason']}", err=True)
            raise typer.Exit(EXIT_CODES[ended.status])
        if unanswered := [one["name"] for one in shown["analyses"] if one["state"] == "none"]:
            say(f"no answer: {', '.join(unanswered)}", err=True)
            raise typer.Exit(2)


@deploy.command()
def status(
    folder: Annotated[
        Path,
        typer.Argument(help="a deployment's directory, its server folder, or a site's folder", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Show a deployment's progress, or one site's alarms.

    The command only reads files in the folder, so it works both during and after the deployment.

    Example: fedloom deploy status hospitals
    """
    with print_errors():
        import json

        from fedloom.lab.printing import print_rows
        from fedloom_sites.deploy.ops.status import find_server, read_status, status_lines, status_table

        if (folder / "site.toml").exists():
            from fedloom_sites.deploy.alarms import site_status
            from fedloom_sites.deploy.setting_files import read_site

            here = site_status(read_site(folder / "site.toml"))
            facts = (f"{what}: {here[what] or 0}" for what in ("site", "messages", "refused", "repeated"))
            last = f"last: {here['last'] or 'never'}"
            alarms = [f"{one['time']} {one['reason']}" for one in here["alarms"]]
            say(*([json.dumps(here, indent=1)] if as_json else [*facts, last, *(alarms or ["no alarm"])]))
            return
        shown = read_status(find_server(folder))
        if as_json:
            say(json.dumps(shown, indent=1))
            return
        say(*status_lines(shown))
        print_rows(status_table(shown), ("site",), width=FILE_COLUMNS)


@deploy.command()
def stop(
    folder: Annotated[Path, typer.Argument(help="a deployment's directory, or its server folder", show_default=False)],
    undo: Annotated[bool, typer.Option("--undo", help="allow the server to start again")] = False,
) -> None:
    """Stop a run at the end of its current round. No results are lost, and the run can be resumed later.

    Example: fedloom deploy stop hospitals
    """
    with print_errors():
        from fedloom.storage.files import delete_files, write_atomic
        from fedloom.storage.locks import is_in_use
        from fedloom_sites.deploy.ops.status import find_server
        from fedloom_sites.deploy.server.run import stop_file

        server = find_server(folder)
        if undo:
            delete_files(stop_file(server))
            say("the next start resumes the run. Start the service of the run again, or start the run by hand")
            return
        write_atomic(stop_file(server), b"")
        runs = "it stops after the current round" if is_in_use(server.checkpoints) else "no run is in progress"
        say(f"{runs}. To resume later: fedloom deploy stop {folder} --undo, then start the run again")


@deploy.command("verify-log")
def verify_log(
    place: Annotated[Path, typer.Argument(help="a log file, or a server's or site's folder", show_default=False)],
) -> None:
    """Check that no line of a log was changed, removed or inserted.

    The log is a server's audit.jsonl or a site's sent.jsonl. Keep a copy of the printed digest elsewhere, because only
    this digest reveals lines missing at the end.

    Example: fedloom deploy verify-log hospitals
    """
    with print_errors():
        from fedloom_sites.deploy.audit import SENT_FILE
        from fedloom_sites.deploy.audit import verify_log as check_log
        from fedloom_sites.deploy.ops.status import find_server
        from fedloom_sites.deploy.setting_files import read_site

        logs = [place]
        if (place / "site.toml").exists():
            logs = sorted(read_site(place / "site.toml").state.glob(f"*/{SENT_FILE}")) or [place / SENT_FILE]
        elif place.is_dir():
            logs = [find_server(place).audit]
        for log in logs:
            end = check_log(log)
            say(f"{log}: {end.lines} lines in an unbroken chain. The last line has SHA-256 {end.digest}")
