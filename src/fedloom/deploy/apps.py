"""The two apps that Flower runs; everything that they do is in `fedloom.deploy.server` and `fedloom.deploy.client`."""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedloom.deploy.client import Client
from fedloom.deploy.server import STOPS, serve
from fedloom.deploy.settings import SERVER_KEY, SITE_KEY, read_server, read_site
from fedloom.errors import ConfigError, FedloomError, RunStopped, Stop

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def run(grid: Grid, context: Context) -> None:
    """The server: its settings are in the file that the run configuration names.

    Raises:
        FedloomError: the run did not get to its end; Flower records it as failed, the sentence has been printed.
    """
    try:
        stop = serve(grid, read_server(_file(context.run_config, SERVER_KEY, "run")), _say)
        if stop is not Stop.DONE:
            raise RunStopped(stop, "see the lines above and the audit log")
    except FedloomError as error:
        if not isinstance(error, RunStopped):
            _say(f"{STOPS}{error}")
        logging.getLogger("flwr").setLevel(logging.CRITICAL)  # it would call this unhandled, with a traceback
        raise


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


@client_app.query()
@client_app.train()
@client_app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """A site: its settings are in the file that the node configuration names."""
    return Client(read_site(_file(context.node_config, SITE_KEY, "node"))).answer(message)


def _file(config: object, key: str, what: str) -> Path:
    value = config.get(key) if hasattr(config, "get") else None
    if not isinstance(value, str) or not value:
        raise ConfigError(f"the {what} configuration needs {key}: the path of a TOML file")
    return Path(value)
