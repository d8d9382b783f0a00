"""The command ``fedloom watch``, which serves the report of a run or deployment in progress to this machine only."""

from __future__ import annotations

import hashlib
import tempfile
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from fedloom.errors import ConfigError, FedloomError, RunDirError
from fedloom.lab.cli._app import app, print_errors, say
from fedloom.rundir import WORK_FOLDER

LOCAL_HOST = "127.0.0.1"
WAITING_PAGE = (
    '<!doctype html><html lang="en"><head><meta '
    'charset="utf-8"><title>fedloom</title></head>\n<body><main><h1>No results yet</h1><p>They will '
    "appear here after an evaluation, without reloading the page.</p></main></body>\n</html>"
)
LIVE_SCRIPT = """<script>
let tag = null;
setInterval(async () => {
  try {
    const answer = await fetch("/", { headers: { "If-None-Match": tag } });
    if (answer.status === 200) renewReport(await answer.text());
    tag = answer.headers.get("ETag");
  } catch { /* the command has ended: the last figures stay */ }
}, %d);
</script></body>"""
"""Script that polls for a new report and redraws only the parts of the page that have changed."""


@app.command(rich_help_panel="Run")
def watch(
    run: Annotated[Path, typer.Argument(help="run directory or deployment directory", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="loopback port (0: any free port)")] = 8321,
    every: Annotated[int, typer.Option(min=1, help="seconds between updates")] = 5,
    list_: Annotated[
        bool,
        typer.Option(
            "--list",
            help="print each run's workers, their progress and their failures without starting a web server",
        ),
    ] = False,
) -> None:
    """Serve the report of a run in progress.

    Open the printed address in a browser on this machine. The page includes a table that shows which process is working
    on which run. Ctrl-C stops the web server but not the run.

    Example: fedloom watch runs/quickstart
    """
    with print_errors():
        if list_:
            from fedloom.lab.experiment.units.status import list_status
            from fedloom.lab.printing import print_rows

            if not (run / "experiment.toml").is_file():
                raise RunDirError(f"{run} is not a run directory. Name the --out directory of 'fedloom run'")
            print_rows(list_status(run))
            return
        page = LivePage(run, every)
        try:
            server = ThreadingHTTPServer((LOCAL_HOST, port), make_request_handler(page))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}). Choose another --port, or 0 for any free port"
            ) from None
        say(f"report: http://{LOCAL_HOST}:{server.server_port}/ (press Ctrl-C to stop)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")
        finally:
            server.server_close()
            page.close()


class LivePage:
    """HTML page with a directory's report. The page is rewritten whenever new metrics are recorded.

    Args:
        folder: folder of a run or of a deployment.
        every: seconds between the browser's requests for updates.

    Raises:
        RunDirError: the folder is neither a run directory nor a deployment.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        if not folder.is_dir():
            raise RunDirError(
                f"{folder} is not a directory. Name the --out directory of 'fedloom run', or the "
                "directory of a deployment"
            )
        if not (folder / "experiment.toml").is_file():
            places = [entry.load() for entry in entry_points(group="fedloom.results")]
            if not places:
                raise RunDirError(f"{folder} is not a run directory. Name the --out directory of 'fedloom run'")
            self._folder = places[0](folder)
        self._draft = tempfile.TemporaryDirectory(prefix="fedloom-watch-")
        self._lock, self._shown_files, self._text = threading.Lock(), object(), WAITING_PAGE

    def text(self) -> str:
        """Return the current page as HTML. If a file temporarily cannot be read, return the previous page."""
        from fedloom.lab import report
        from fedloom.lab.experiment.live import copy_live_run, find_modified_files
        from fedloom.lab.report.document import CONTENT_POLICY

        work = self._work_table()
        with self._lock, suppress(FedloomError, FileNotFoundError):
            if (newest_files := find_modified_files(self._folder)) != self._shown_files:
                place = Path(self._draft.name)
                tables = copy_live_run(self._folder, place / self._folder.resolve().name)
                self._text = report.write_report([tables], place / "page.html", charts=False).read_text(
                    encoding="utf-8"
                )
                self._shown_files = newest_files
        if self._text is WAITING_PAGE:
            refresh = f'<meta http-equiv="refresh" content="{self._every}">'
            text = self._text.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{refresh}', 1)
            return text.replace("</main>", f"{work}</main>", 1)
        live = self._text.replace(CONTENT_POLICY, f"{CONTENT_POLICY}; connect-src 'self'", 1)
        live = live.replace('<main class="wrap">', f'<main class="wrap">{work}', 1)
        return (LIVE_SCRIPT % (1000 * self._every)).join(live.rsplit("</body>", 1))

    def _work_table(self) -> str:
        """Return a table that shows which process is working on which unit while several processes share the directory.

        If only one process uses the directory, return an empty string.
        """
        from fedloom.lab.experiment.units.status import list_status
        from fedloom.lab.report.markup import render_scrolling_table

        if not (self._folder / WORK_FOLDER).is_dir():
            return ""
        with suppress(OSError, ValueError, KeyError):
            rows = list_status(self._folder)
            table = render_scrolling_table("Who works on what", [*rows[0]], [[*row.values()] for row in rows])
            return f"<section><h2>Who works on what</h2>{table}</section>"
        return ""

    def close(self) -> None:
        """Delete the page's temporary files."""
        self._draft.cleanup()


def make_request_handler(page: LivePage) -> type[BaseHTTPRequestHandler]:
    """Return a request handler that serves the page at ``GET /`` and rejects all other paths and host names.

    The host name is checked because another website could make its own name resolve to this machine and thereby read
    the page.
    """

    class Handler(BaseHTTPRequestHandler):
        server: ThreadingHTTPServer

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            hosts = {f"{name}:{self.server.server_port}" for name in (LOCAL_HOST, "localhost")}
            if self.headers.get("Host", "") not in hosts:
                self.send_error(HTTPStatus.FORBIDDEN, "Wrong host")
                return
            if self.path.partition("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            content = page.text().encode()
            tag = f'"{hashlib.sha256(content).hexdigest()}"'
            if self.headers.get("If-None-Match") == tag:
                content = b""
            self.send_response(HTTPStatus.OK if content else HTTPStatus.NOT_MODIFIED)
            self.send_header("ETag", tag)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            with suppress(ConnectionError):  # the browser has closed the connection
                self.wfile.write(content if body else b"")

        def log_message(self, format: str, *args: object) -> None:
            """Do not log messages, because the user works in this terminal."""

    return Handler
