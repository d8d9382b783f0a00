"""The example of a Flower app, in this process, with several methods."""

from __future__ import annotations

import sys
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from tests.flower.app import App

FOLDER = Path(__file__).parents[4] / "examples" / "flower"


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import quickstart.client_app
    import quickstart.server_app

    yield quickstart
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]


def config(method: str, rounds: int) -> dict[str, Any]:
    return {"method": method, "num-server-rounds": rounds, "min-nodes": 3}


@pytest.mark.parametrize("method", ["fedavg", "ditto", "flame", "scaffold", "fedala", "fedrep"])
def test_the_example_runs_with_several_methods(
    quickstart: Any, method: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom.algorithms import REGISTRY

    if method not in REGISTRY:
        pytest.skip(f"{method} is no method of the registry")
    app = App(lambda context: None, 3)  # type: ignore[arg-type, return-value]
    app.apps = dict.fromkeys(app.contexts, quickstart.client_app.app)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config(method, 5))
    quickstart.server_app.app(app.grid, context)
    figures = literal_eval(capsys.readouterr().out.strip().splitlines()[-1])
    model = "global" if method in ("fedavg", "scaffold") else "personal"
    assert figures[f"{model}/test/accuracy"] > (0.5 if model == "global" else 0.8)
