"""The page in a real browser: charts, tooltips, downloads, keyboard, accessibility; wide and narrow, light and dark."""

from __future__ import annotations

import csv
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from recorded import Recording

from fedloom.lab import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
FLAGS = ["--no-sandbox", "--disable-gpu"]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with everything that a report can show of it."""
    run = Recording(methods=4, seeds=5, rounds=10, clients=6, extras=True, attack=0.2).write(
        tmp_path_factory.mktemp("run") / "rich"
    )
    cells = [("ditto", 0, c, "personal", t, g, 1 + 4 * (t == g)) for c in range(6) for t in range(3) for g in range(3)]
    store(run / "confusion.parquet", ("method", "seed", "client", "model", "true", "predicted", "count"), cells)
    points = [("ditto", 0, c, "personal", float(k % 3), float(k), float(k * c)) for c in (2, 3) for k in range(9)]
    store(run / "tsne.parquet", ("method", "seed", "client", "model", "label", "x", "y"), points)
    store(run / "hazards.parquet", ("column", "level", "hazard_ratio"), [("sex", "f", 1.0), (None, "m", 1.2)])
    return report.write_report([run], run / "report.html")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs that differ in the share of attackers."""
    folder = tmp_path_factory.mktemp("runs")
    recordings = {share: Recording(methods=3, seeds=2, rounds=10, clients=5, attack=share) for share in (0.0, 0.2, 0.4)}
    return report.write_report(
        [r.write(folder / f"share-{share}") for share, r in recordings.items()], folder / "report.html"
    )


def store(path: Path, names: tuple[str, ...], rows: list[tuple]) -> None:
    pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), path)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=600_000)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a page whose every word to the console and request to elsewhere is a failure."""
    complaints: list[str] = []
    pages: list[Page] = []

    def opened(path: Path, size: str = "desktop", look: str = "light") -> Page:
        width, height = SIZES[size]
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=look)
        page.set_default_timeout(600_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else complaints.append(r.url)
        )
        pages.append(page)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        return page

    yield opened
    for page in pages:
        page.close()
    assert complaints == []


def walk(page: Page) -> Iterator[Locator]:
    """Every figure of the page, its tab chosen and its chart drawn."""
    tabs = {tab.get_attribute("value"): tab for tab in page.locator(".tabs input").all()}
    for figure in page.locator("figure").all():
        if not figure.is_visible():
            tabs[figure.get_attribute("id")].locator("xpath=..").click()
        figure.locator("svg.marks, canvas.marks").wait_for()
        yield figure


@pytest.mark.parametrize(
    ("name", "size", "look"),
    [
        ("rich", "desktop", "light"),
        ("rich", "phone", "dark"),
        pytest.param("rich", "desktop", "dark", marks=pytest.mark.slow),
        pytest.param("rich", "phone", "light", marks=pytest.mark.slow),
        pytest.param("comparison", "desktop", "light", marks=pytest.mark.slow),
        pytest.param("comparison", "phone", "dark", marks=pytest.mark.slow),
    ],
)
def test_every_chart_is_drawn_within_the_page_and_nothing_bars_anyone(
    name: str, size: str, look: str, request: pytest.FixtureRequest, open_page: Open
) -> None:
    page = open_page(request.getfixturevalue(name), size, look)
    assert page.locator("html").get_attribute("data-look") == look
    drawn = 0
    for figure in walk(page):
        room, chart = (figure.locator(what).first.bounding_box() for what in (".chart", ".marks"))
        assert chart["width"] <= room["width"] + 1, figure.get_attribute("id")
        assert chart["height"] > 60
        drawn += 1
    assert drawn == page.locator("figure").count() >= 12
    page.locator("dl.words dd").first.evaluate("field => field.textContent = '0'.repeat(64)")  # a checksum
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_tables_fit_on_paper(rich: Path, open_page: Open) -> None:
    """A4 with usual margins; the page names the file with the columns that are behind a fold."""
    page = open_page(rich)
    wide = page.locator("#results .further thead th").count()
    page.set_viewport_size({"width": 718, "height": 1000})
    page.emulate_media(media="print")
    for table in page.locator("table").all():
        assert not table.is_visible() or table.bounding_box()["width"] <= 718
    shown = [head for head in page.locator("#results thead th").all() if head.is_visible()]
    after = page.evaluate("getComputedStyle(document.querySelector('#results'), '::after').content")
    assert len(shown) == page.locator("#results .results thead th").count() <= 11
    assert wide > 2
    assert "results.csv" in after


def test_no_name_is_cut_on_a_phone(open_page: Open, tmp_path: Path) -> None:
    plain = Recording(methods=4, seeds=2, rounds=10, clients=5).write(tmp_path / "plain")
    other = Recording(methods=4, seeds=2, rounds=10, clients=5, seed=1).write(tmp_path / "a-run-with-quite-a-long-name")
    page = open_page(report.write_report([plain, other], tmp_path / "report.html"), "phone")
    drawn = {figure.get_attribute("id"): figure for figure in walk(page)}
    assert {"place-relative", "place-clients"} <= drawn.keys()
    texts = page.locator("figure svg.marks text").evaluate_all("all => all.map(text => text.textContent)")
    assert [text for text in texts if "…" in text] == []
    tabs = {tab.get_attribute("value"): tab for tab in page.locator(".tabs input").all()}
    for name in ("place-relative", "place-clients"):
        if not drawn[name].is_visible():
            tabs[name].locator("xpath=..").click()
        labels = drawn[name].locator(".role-axis-label text").all()
        lines = "e => [...(e.children.length ? e.children : [e])].map(line => line.textContent).join(' ')"
        texts = [label.evaluate(lines) for label in labels]
        assert any("a-run-with-quite-a- long-name" in text for text in texts)
        assert not [text for text in texts if "…" in text]
        boxes = [label.bounding_box() for label in labels]
        names = sorted((b for b, text in zip(boxes, texts, strict=True) if "·" in text), key=lambda box: box["y"])
        assert all(one["y"] + one["height"] <= two["y"] + 3 for one, two in itertools.pairwise(names))


def test_every_chart_is_downloaded_as_svg_and_its_data_as_csv(rich: Path, open_page: Open, tmp_path: Path) -> None:
    page = open_page(rich)
    for figure in walk(page):
        for kind in ("svg", "csv"):
            with page.expect_download() as waiting:
                figure.locator(f'button[data-do="{kind}"]').click()
            file = tmp_path / waiting.value.suggested_filename
            waiting.value.save_as(file)
            assert file.name == f"{figure.get_attribute('id').removeprefix('place-')}.{kind}"
        assert file.with_suffix(".svg").read_text().startswith("<svg")
        figure.locator("summary").click()
        figure.locator("tbody").wait_for()
        lines = list(csv.reader(file.read_text().splitlines()))
        assert [cell.inner_text() for cell in figure.locator("thead th").all()] == lines[0]
        shown = figure.locator("tbody tr").count()
        assert shown == len(lines) - 1 or (shown == 301 and len(lines) > 301)


def test_tables_and_settings_are_downloaded(rich: Path, open_page: Open) -> None:
    page = open_page(rich)
    page.get_by_text("Experiment file, as resolved").click()
    for text, name, start in (
        ("Table as CSV", "results.csv", "run,method"),
        ("Table as LaTeX", "results.tex", "% \\usepackage"),
        ("TOML", "rich.toml", "name ="),
    ):
        with page.expect_download() as waiting:
            page.locator("button", has_text=text).click()
        assert waiting.value.suggested_filename == name
        assert Path(waiting.value.path()).read_text().startswith(start)


def test_a_mark_tells_its_numbers(rich: Path, open_page: Open) -> None:
    page = open_page(rich)
    dot = page.locator("#place-fairness .mark-symbol path[aria-label]").last
    dot.scroll_into_view_if_needed()
    dot.hover(force=True)
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert "Accuracy (%)" in tip.inner_text()
    assert "Variance" in tip.inner_text()


def test_all_is_done_by_keyboard(rich: Path, open_page: Open) -> None:
    page = open_page(rich)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator("#curves .tabs input").first.focus()
    page.keyboard.press("ArrowRight")
    page.locator("#place-curves-accuracy-bytes svg.marks").wait_for()
    assert not page.locator("#place-curves-accuracy-round").is_visible()
    head = page.locator(".results thead th").nth(2)
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    values = [float(td.get_attribute("data-value")) for td in page.locator(".results tbody td:nth-child(3)").all()]
    assert values == sorted(values, reverse=True)
    reachable = page.evaluate(
        "[...document.querySelectorAll('button, summary, a[href], .scroll')].every(e => e.tabIndex === 0)"
    )
    assert reachable


def test_the_look_can_be_chosen(rich: Path, open_page: Open) -> None:
    page = open_page(rich, look="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.get_by_role("button", name="Light mode").click()
    page.get_by_role("button", name="Dark mode").wait_for()
    assert page.evaluate(paper) == "rgb(255, 255, 255)" != dark
