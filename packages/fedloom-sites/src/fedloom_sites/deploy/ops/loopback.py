"""A complete deployment on this machine: server, sites and a run, over TLS and with node keys, on loopback."""

from __future__ import annotations

import os
import shutil
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import create_connection
from typing import Any

from fedloom.errors import ConfigError, Stop
from fedloom.storage import lock
from fedloom.storage.files import read_content
from fedloom_sites.deploy.code import check_code, read_agreed
from fedloom_sites.deploy.ops.admitted import admitted_key_file, is_revoked
from fedloom_sites.deploy.ops.commands import (
    ANSWER_SECONDS,
    ask_flower,
    command_words,
    flower_profile,
    process_environment,
)
from fedloom_sites.deploy.ops.directory import APP_FOLDER, CLI_FOLDER, LOCAL_FOLDER
from fedloom_sites.deploy.ops.processes import ManagedProcess, ManagedProcesses, ProcessError, check_free, free_port
from fedloom_sites.deploy.ops.table import site_table
from fedloom_sites.deploy.server.run import STOP_PREFIX, finished_hint, finished_reason
from fedloom_sites.deploy.setting_files import (
    check_fingerprint,
    check_version,
    describe_folder,
    read_server,
    read_site,
)
from fedloom_sites.deploy.settings import Server, Site
from fedloom_sites.deploy.site.local_data import site_federation

LOG_PREFIX = "fedloom: "
"""Prefix of human-readable lines in the server's log."""
RENEW_HINT = "'fedloom deploy renew' creates a new certificate and key for the server"
"""Advice about invalid files of the server's certificate."""

PrintFunction = Callable[[str], None]


class LoopbackDeployment:
    """The server and the sites of a deployment's directory, on this machine.

    Args:
        folder: directory that `fedloom deploy init` wrote.
        processes: context manager that owns the processes of the server and the sites. They end with the block.
        port: the server's port. If None, a free port is chosen.

    Raises:
        ConfigError: the folder is not a deployment's directory, or a file differs from the one that was agreed on.
    """

    def __init__(self, folder: Path, processes: ManagedProcesses, port: int | None = None) -> None:
        self.folder, self._processes = folder.resolve(), processes
        self._server_file = self.folder / "server" / "server.toml"
        if not self._server_file.exists():
            raise ConfigError(
                f"{folder} {describe_folder(folder)}. Pass the directory that "
                "'fedloom deploy init' wrote, which contains the folders of the server and of all sites"
            )
        agreed = read_server(self._server_file)
        self.sites: dict[str, Site] = {m.site: read_site(self.site_file(m.site)) for m in agreed.sites}
        for side in (agreed, *self.sites.values()):
            check_fingerprint(side)
            check_code(side)
            check_version(side)
        self.work = self.folder / LOCAL_FOLDER
        self.server: Server = agreed.model_copy(
            update={"address": "127.0.0.1", "port": port or free_port(), "database": self.work / "superlink.db"}
        )

    @property
    def address(self) -> str:
        """Address that the server listens on, as host:port."""
        return f"{self.server.address}:{self.server.port}"

    def site_file(self, name: str) -> Path:
        """Return the path of a site's TOML file."""
        return self.folder / "sites" / name / "site.toml"

    def start_server(self) -> None:
        """Start the server's two processes, and wait until the server answers.

        Raises:
            ConfigError: the port is in use, or a file of the certificate is missing, damaged or part of a different
                certificate.
            ProcessError: the server has ended or does not answer.
        """
        check_free(self.server.port, "the server")
        check_certificate(self.server)
        shutil.rmtree(self.work, ignore_errors=True)
        (self.work / CLI_FOLDER).mkdir(mode=0o700, parents=True)
        (self.work / CLI_FOLDER / "config.toml").write_text(flower_profile(self.address, self.server.ca))
        self._await_tls(self._start("superlink", command_words("superlink", self.server)))
        self._start("superexec", [*command_words("superexec", self.server), "--parent-pid", str(os.getpid())])

    def register(self, public_key: Path) -> int:
        """Admit the node with this key, and return the node's number."""
        return int(self.ask("register", public_key=public_key)["node-id"])

    def register_all(self) -> dict[str, int]:
        """Admit every site whose key was not revoked, and return the node numbers keyed by site name.

        These are the numbers that Flower has given to the sites' nodes.
        """
        server = self.folder / "server"
        return {
            name: self.register(admitted_key_file(server, name)) for name in self.sites if not is_revoked(server, name)
        }

    def start_site(self, name: str, **changes: object) -> ManagedProcess:
        """Start and return a site's process.

        The site joins without any further commands. The arguments in ``changes`` replace some of the settings.
        """
        settings = {"server": self.address, "port": free_port(), **changes}
        site = self.sites[name].model_copy(update=settings)
        file = self.site_file(name)
        return self._start(f"site-{name}", command_words("supernode", site, file=file), file.parent, site.threads)

    def run(self, show: PrintFunction) -> None:
        """Run the experiment until it ends.

        Args:
            show: function that is called with each line of the server's log.

        Raises:
            ProcessError: the run stopped early or failed, or the server ended before the run did.
        """
        serving, sites = self._processes.started[:2], self._processes.started[2:]
        words = command_words("run", app=self.folder / "server" / APP_FOLDER, file=self._server_file)
        (self.work / "run.log").unlink(missing_ok=True)  # the log of the previous run
        stream = self._start("run", words)
        with stream.log.open() as log:

            def pass_on() -> None:
                for line in log.readlines():
                    if not line.startswith(STOP_PREFIX):
                        show(line.rstrip("\n"))

            while stream.alive():
                for process in serving:
                    process.check()
                for process in [p for p in sites if not p.alive()]:
                    show(f"{LOG_PREFIX}{process.name} has ended, the others continue. The end of {process.log}:")
                    show(f"{LOG_PREFIX}{process.tail(3)}")
                    sites.remove(process)
                pass_on()
                time.sleep(0.2)
            pass_on()
        if self._processes.end(stream) != 0:
            raise ProcessError(f"the run could not be started or followed. The end of {stream.log}:\n{stream.tail()}")
        if stops := [line for line in stream.log.read_text().splitlines() if line.startswith(STOP_PREFIX)]:
            raise stop_error(stops[-1])
        status = self.status()
        if status != "finished:completed":
            cure = "run the same command again to resume. If the run ends like this again, see the log"
            raise ProcessError(f"the run ended with status {status}; {cure}. The end of {stream.log}:\n{stream.tail()}")

    def status(self) -> str:
        """Return the status of the last run, in Flower's words."""
        runs = self.ask("runs")["runs"]
        return str(runs[0]["status"]) if runs else "not started"

    def ask(self, question: str, **values: Any) -> dict[str, Any]:
        """Run a command from `ops/commands.toml` with Flower's command line, and return its answer.

        Raises:
            ProcessError: the command failed or took too long.
        """
        return ask_flower(question, self.work / CLI_FOLDER, **values)

    def table(self) -> list[dict[str, Any]]:
        """Return each site's latest metrics (see `site_table`)."""
        return site_table(self.server.results / "metrics.parquet", {m.client: m.site for m in self.server.sites})

    def _start(
        self, name: str, words: Sequence[str], folder: Path | None = None, threads: int | None = None
    ) -> ManagedProcess:
        """Start and return a process of the server or of a site.

        Its working directory is the folder of the server or the site, as under systemd.
        """
        variables = process_environment(self.work / (CLI_FOLDER if name == "run" else name), threads=threads)
        log = self.work / f"{name}.log"
        return self._processes.start(name, words, variables, log, folder or self.folder / "server")

    def _await_tls(self, link: ManagedProcess) -> None:
        context = ssl.create_default_context(cafile=self.server.ca)
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            link.check()
            try:
                with (
                    create_connection((self.server.address, self.server.port), timeout=5) as plain,
                    context.wrap_socket(plain, server_hostname=self.server.address),
                ):
                    return
            except ssl.SSLCertVerificationError as error:
                raise ProcessError(
                    f"the server's certificate is not valid: {error.verify_message}; {RENEW_HINT}"
                ) from None
            except OSError as error:
                if time.monotonic() > end:
                    raise ProcessError(f"the server does not answer on {self.address}: {error}") from None
                time.sleep(0.1)


def check_certificate(server: Server) -> None:
    """Raise an error if the files of the server's certificate cannot be used together."""
    for what, path in (("certificate", server.certificate), ("private key", server.key)):
        read_content(path, f"the server's {what}", RENEW_HINT)
    read_content(server.ca, "the authority's certificate", "authority/ has another copy")
    try:
        ssl.create_default_context(cafile=server.ca)
    except ssl.SSLError:
        raise ConfigError(
            f"{server.ca} is not a certificate in PEM format. The folder authority/ contains a copy"
        ) from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.certificate, server.key, lambda: "")
    except ssl.SSLError as error:
        other = error.reason == "KEY_VALUES_MISMATCH"
        fault = f"is not the key of {server.certificate.name}" if other else "and its certificate cannot be read as PEM"
        raise ConfigError(f"{server.key} {fault}; {RENEW_HINT}") from None


def stop_error(line: str) -> ProcessError:
    """Return the error for a line of the server's log that states why the run stopped."""
    reason = line.removeprefix(STOP_PREFIX)
    stop = next((stop for stop in Stop if reason.startswith(stop.value)), Stop.FAILED)
    return ProcessError(line.removeprefix(LOG_PREFIX), stop)


def run_all(folder: Path, show: PrintFunction, port: int | None = None) -> LoopbackDeployment:
    """Run the deployment in a directory on this machine until its experiment ends, and return the deployment.

    After that, all processes have ended.

    Args:
        folder: the directory.
        show: function that is called with every human-readable message.
        port: the server's port. If None, a free port is chosen.

    Raises:
        ConfigError: the folder is not a deployment's directory, or the port is in use.
        DataError: a site's data cannot be read, or do not match the experiment.
        RunDirError: the deployment is already running in another process.
        ProcessError: the server or the run failed.
    """

    def say(line: str) -> None:
        if line.startswith(LOG_PREFIX):
            show(line.removeprefix(LOG_PREFIX))

    processes = ManagedProcesses()
    here = LoopbackDeployment(folder, processes, port)
    if ended := finished_reason(here.server):
        show(finished_hint(ended))
        return here
    for site in here.sites.values():
        site_federation(read_agreed(site), site)
    with lock(here.folder, wait=0), processes:
        here.start_server()
        show(f"the server answers on {here.address}, over TLS")
        nodes = here.register_all()
        for name in here.sites:
            if name in nodes:
                show(f"site {name} is node {nodes[name]}")
                here.start_site(name)
            else:
                show(
                    f"site {name} cannot connect, because its key was revoked. 'fedloom deploy remove' "
                    "tells the server not to wait for it"
                )
        here.run(say)
    return here
