"""The two apps that Flower runs: the server's app (`fedloom_sites.deploy.server.run`), and a site's app.

Flower imports this module for every message to a site, so PyTorch is imported only for the server.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedloom.errors import ConfigError, FedloomError, RunStopped
from fedloom_sites.deploy.site.handover import hand_over
from fedloom_sites.flwr_adapter import decode_records, encode_records

SITE_KEY = "site"
"""Key in a SuperNode's node configuration for the path of the site's TOML file."""

SERVER_KEY = "server"
"""Key in the run configuration for the path of the server's TOML file."""

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def run_server(grid: Grid, context: Context) -> None:
    """Run the server. The run configuration names the file that contains the server's settings.

    Raises:
        FedloomError: the run did not finish. Flower records the run as failed after the message has been printed.
    """
    from fedloom_sites.deploy.server.run import STOP_PREFIX, finished_reason, serve_run
    from fedloom_sites.deploy.setting_files import read_server

    try:
        settings = read_server(_configured_file(context.run_config, SERVER_KEY, "run"))
        stop = serve_run(grid, settings, _print_line)
        if finished_reason(settings) is None or stop.status == "failed":
            raise RunStopped(stop, "see the lines above and the audit log")
    except FedloomError as error:
        if not isinstance(error, RunStopped):
            _print_line(f"{STOP_PREFIX}{error}")
        # Flower would log a traceback and call the error unhandled
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        raise


def _print_line(line: str) -> None:
    print(line, flush=True)  # noqa: T201


@client_app.query()
@client_app.train()
@client_app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Answer a message as a site, and return the reply.

    The node configuration names the file that contains the site's settings.
    """
    reply = hand_over(_configured_file(context.node_config, SITE_KEY, "node"), encode_records(message.content))
    return Message(decode_records(reply), reply_to=message)


def _configured_file(config: object, key: str, what: str) -> Path:
    value = config.get(key) if hasattr(config, "get") else None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"the {what} configuration needs {key}: the path of a TOML file")
    return Path(value)
