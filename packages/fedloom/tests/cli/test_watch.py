"""The report of a run while it goes on: served on loopback, to a browser on this machine, and nothing else of it."""

from __future__ import annotations

import http.client
import os
import pkgutil
import shutil
import threading
import tomllib
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

from fedloom.errors import FedloomError
from fedloom.lab.cli import app
from fedloom.lab.cli.watch import LOCAL_HOST, LivePage, make_request_handler
from fedloom.lab.experiment import Plan, live, parse
from fedloom.lab.experiment.events import Event

SMALL = """
name = "small"
rounds = 3
seeds = [0, 1]
[data]
source = "digits"
[partition]
clients = 3
[evaluate]
every = 1
[[method]]
algorithm = "fedavg"
"""


class Watched:
    """A server on a page, and the status and text of its answers."""

    def __init__(self, page: LivePage) -> None:
        self.server = ThreadingHTTPServer((LOCAL_HOST, 0), make_request_handler(page))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def get(self, path: str = "/", host: str | None = None, method: str = "GET") -> tuple[int, str]:
        line = http.client.HTTPConnection(LOCAL_HOST, self.server.server_port, timeout=600)
        line.request(method, path, headers={"Host": host or f"{LOCAL_HOST}:{self.server.server_port}"})
        answer = line.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Path, Watched, LivePage]]:
    out = tmp_path / "run"
    out.mkdir()
    (out / "experiment.toml").write_text(SMALL)
    page = LivePage(out, 7)
    found = Watched(page)
    yield out, found, page
    found.server.shutdown()
    found.server.server_close()
    page.close()


def test_a_run_is_watched_from_its_first_figures_to_its_end(
    watched: tuple[Path, Watched, LivePage], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, server, _ = watched
    status, text = server.get()
    assert (status, "No results yet" in text) == (200, True)
    assert '<meta http-equiv="refresh" content="7">' in text
    monkeypatch.setattr(live, "WRITE_INTERVAL_SECONDS", 0.0)
    pages: list[str] = []
    rounds: list[set[tuple[int, int]]] = []

    def look(event: Event) -> None:
        if event.round == 2 and not event.status and event.seed == 1:
            table = pq.read_table(live.copy_live_run(out, out.parent / "copy") / "metrics.parquet")
            rounds.append(set(zip(*(table[name].to_pylist() for name in ("seed", "round")), strict=True)))
            pages.append(server.get()[1])

    (out / "experiment.toml").unlink()
    plan = Plan(parse(tomllib.loads(SMALL)), out)
    plan.run(look, page=False)
    assert {(0, 3), (1, 1)} <= rounds[0]
    assert (1, 3) not in rounds[0]
    assert 'id="results"' in pages[0]
    assert "unfinished" in pages[0]
    assert not (out / live.LIVE_FOLDER).exists()
    assert live.copy_live_run(out, out.parent / "copy") == out
    after = server.get()[1]
    assert "unfinished" not in after
    assert server.get()[1] == after


def test_the_last_rounds_of_a_run_are_there_however_short_it_was(
    watched: tuple[Path, Watched, LivePage], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, server, _ = watched
    monkeypatch.setattr(live, "WRITE_INTERVAL_SECONDS", 3600.0)
    pages: list[str] = []

    def look(event: Event) -> None:
        if event.round == 2 and not event.status and event.seed == 1:
            table = pq.read_table(live.copy_live_run(out, out.parent / "copy") / "metrics.parquet")
            assert set(table["seed"].to_pylist()) == {0}
            assert max(table["round"].to_pylist()) == 3
            pages.append(server.get()[1])

    (out / "experiment.toml").unlink()
    Plan(parse(tomllib.loads(SMALL)), out).run(look, page=False)
    assert "3 rounds" in pages[0]


@pytest.mark.parametrize("name", ["os.stat", "os.scandir", "pyarrow.parquet.read_table"])
def test_a_run_that_deletes_its_figures_at_its_end_leaves_the_page_as_it_was(
    watched: tuple[Path, Watched, LivePage], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whichever comes in between: the look whether they are there, their list, or their content."""
    out, server, _ = watched
    monkeypatch.setattr(live, "WRITE_INTERVAL_SECONDS", 0.0)
    (out / "experiment.toml").unlink()
    with pytest.raises(KeyboardInterrupt):
        Plan(parse(tomllib.loads(SMALL)), out).run(_interrupt, page=False)
    shown = server.get()[1]
    assert 'id="results"' in shown
    folder, call, looks = out / live.LIVE_FOLDER, pkgutil.resolve_name(name), list[Any]()
    for path in folder.glob("*.parquet"):
        os.utime(path)  # there is news

    def look(path: Any, *more: Any, **options: Any) -> Any:
        if str(path).startswith(str(folder)):
            looks.append(path)
            if len(looks) == (1 if name != "os.stat" else 3):
                shutil.rmtree(folder)
        return call(path, *more, **options)

    monkeypatch.setattr(name, look)
    answer = server.get()
    monkeypatch.undo()
    assert not folder.exists()
    assert answer == (200, shown)


def _interrupt(event: Event) -> None:
    if event.round == 2:
        raise KeyboardInterrupt


def test_what_has_not_changed_is_not_sent_again(watched: tuple[Path, Watched, LivePage]) -> None:
    _, server, _ = watched
    line = http.client.HTTPConnection(LOCAL_HOST, server.server.server_port, timeout=600)
    name = {"Host": f"{LOCAL_HOST}:{server.server.server_port}"}
    line.request("GET", "/", headers=name)
    first = line.getresponse()
    first.read()
    for tag, status in ((first.headers["ETag"], 304), ('"another"', 200)):
        line = http.client.HTTPConnection(LOCAL_HOST, server.server.server_port, timeout=600)
        line.request("GET", "/", headers={**name, "If-None-Match": tag})
        answer = line.getresponse()
        assert (answer.status, bool(answer.read())) == (status, status == 200)


@pytest.mark.slow
def test_a_browser_draws_what_is_new_and_leaves_the_rest(tmp_path: Path) -> None:
    """The page is not loaded again: tab, look and charts stay; a method that is added later comes by itself."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium is installed")
    text, out = tomllib.loads(SMALL), tmp_path / "run"
    Plan(parse(text), out).run(page=False)
    page = LivePage(out, 1)
    server = Watched(page)
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"], timeout=600_000
        )
        shown = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="light")
        shown.set_default_timeout(600_000)
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.goto(f"http://{LOCAL_HOST}:{server.server.server_port}/")
        shown.wait_for_selector("html[data-ready=yes]", state="attached")
        shown.get_by_role("button", name="Dark mode").click()
        shown.locator("#curves .tabs input").nth(1).check(force=True)
        chosen = shown.locator("#curves .tabs input:checked").get_attribute("value")
        shown.locator("#partition .chart svg").first.wait_for()
        shown.evaluate("window.mine = document.querySelector('#partition .chart svg')")
        text["method"].append({"algorithm": "ditto"})
        Plan(parse(text), out).run(page=False)
        shown.locator(".results tbody th", has_text="ditto").first.wait_for()
        shown.locator(f"#{chosen} svg.marks", has_text="ditto").wait_for()
        assert shown.evaluate("window.mine.isConnected")
        assert shown.locator("#curves .tabs input:checked").get_attribute("value") == chosen
        assert shown.locator("html").get_attribute("data-look") == "dark"
        assert shown.evaluate("document.documentElement.scrollWidth") <= 390
        found = Axe().run(shown)
        browser.close()
    server.server.shutdown()
    server.server.server_close()
    page.close()
    assert found.violations_count == 0, found.generate_report()
    assert complaints == []


def test_nothing_else_is_served(watched: tuple[Path, Watched, LivePage]) -> None:
    out, server, _ = watched
    port = server.server.server_port
    assert server.server.server_address[0] == "127.0.0.1"
    for path in ("/experiment.toml", "/../experiment.toml", f"/{out}", "/%2e%2e/", "/page.html"):
        assert server.get(path)[0] == 404, path
    for host in ("evil.example", f"evil.example:{port}", LOCAL_HOST, f"{LOCAL_HOST}:1", ""):
        assert server.get(host=host or " ")[0] == 403, host
    assert server.get(host=f"localhost:{port}")[0] == 200
    assert server.get(method="POST")[0] == 501
    assert server.get(method="HEAD") == (200, "")


def test_what_cannot_be_watched_is_a_sentence(tmp_path: Path) -> None:
    for folder, sentence in ((tmp_path / "none", "is not a directory"), (tmp_path, "and no server.toml")):
        done = CliRunner().invoke(app, ["watch", str(folder)])
        assert done.exit_code == 2
        assert sentence in done.output
    with pytest.raises(FedloomError):
        LivePage(tmp_path, 1)


def test_a_deployment_is_watched_by_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = pytest.importorskip("fedloom_sites.deploy.ops.status")
    results = tmp_path / "server" / "results"
    results.mkdir(parents=True)

    class Settings:
        results = tmp_path / "server" / "results"

    monkeypatch.setattr(deployment, "find_server", lambda folder: Settings)
    page = LivePage(tmp_path, 3)
    assert "No results yet" in page.text()
    Plan(parse({**tomllib.loads(SMALL), "rounds": 1, "seeds": [0]}), results).run(page=False)
    assert 'id="results"' in page.text()
    page.close()
