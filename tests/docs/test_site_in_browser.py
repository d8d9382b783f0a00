"""The documentation in a real browser: nothing is fetched, cut or barred, wide and narrow, light and dark."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
WIDE_PAGES = {"methods/defaults", "mutants", "python", "reference/data"}
"""Pages with code or numbers in tables that a phone cannot show at once."""


class Quiet(SimpleHTTPRequestHandler):
    """Files of the site, without a line for each."""

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=600_000
        )
        yield started
        started.close()


@pytest.mark.parametrize("look", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["index", "gallery", "papers", "map", "methods/flame", "start", "experiment-file"])
def test_a_page_stands_in_the_browser(address: str, browser: Browser, name: str, size: str, look: str) -> None:
    complaints: list[str] = []
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=look)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith((address, "data:", "blob:")) else complaints.append(r.url))
    page.goto(f"{address}/{name}.html", wait_until="networkidle")
    assert page.locator("body").get_attribute("data-md-color-scheme") == {"light": "default", "dark": "slate"}[look]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for picture in page.locator("article img:visible").all():
        picture.scroll_into_view_if_needed()
        if "/mark-" in str(picture.get_attribute("src")):  # it stands beside its word
            assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 16
            continue
        assert picture.get_attribute("alt")
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100
    images = page.locator("article img")
    changed = images.evaluate_all("all => all.filter(i => getComputedStyle(i).filter != 'none').map(i => i.src)")
    assert all("/gallery/" in source for source in changed), "only charts with a ground of their own are inverted"
    if name.startswith("methods/"):
        assert page.locator(".formula math").bounding_box()["height"] > 15
    found = Axe().run(page)
    page.close()
    assert complaints == []
    assert found.violations_count == 0, found.generate_report()


def test_the_papers_page_can_be_read_wide_and_narrow(address: str, browser: Browser) -> None:
    narrow = """table => {
      const probe = document.createElement('span')
      Object.assign(probe.style, {font: getComputedStyle(table).font, position: 'absolute'})
      probe.textContent = '0'.repeat(12)
      document.body.append(probe)
      const twelve = probe.getBoundingClientRect().width
      probe.remove()
      return [...table.rows[0].cells].filter(cell => {
        const style = getComputedStyle(cell)
        return cell.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) < twelve
      }).map(cell => cell.innerText)
    }"""
    scrolls = "all => all.filter(box => box.scrollWidth > box.clientWidth).map(box => box.innerText.slice(0, 40))"
    for width, height in ((1400, 900), (390, 844)):
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(f"{address}/papers.html", wait_until="networkidle")
        first = page.locator("article table").first.bounding_box()
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        boxes = page.locator("article :is(.scrolls, .md-typeset__scrollwrap, pre, pre > code, .formula)")
        assert boxes.evaluate_all(scrolls) == []
        if width == 1400:
            assert first is not None
            assert first["y"] + first["height"] <= height, "five papers stand on one screen"
            tables = page.locator("article table").all()
            assert len(tables) > 10
            assert [column for table in tables for column in table.evaluate(narrow)] == []
        page.close()


@pytest.mark.parametrize(
    ("name", "size", "pixels"),
    [(name, "phone", 9) for name in ("index", "map", "papers", "gallery")]
    + [(name, "desktop", 14) for name in ("map", "papers", "map/absent", "papers/fiaelt-synthetic-published")],
)
def test_tables_and_texts_of_charts_fit(address: str, browser: Browser, name: str, size: str, pixels: float) -> None:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(f"{address}/{name}.html", wait_until="networkidle")
    wide = "all => all.filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 40))"
    if size == "phone":
        assert page.locator("article .scrolls:has(table)").evaluate_all(wide) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for picture in page.locator("article img:visible").all():
        picture.scroll_into_view_if_needed()
        source = str(picture.get_attribute("src"))
        if "/mark-" in source:
            continue
        shown, natural = picture.evaluate(
            "image => image.decode().then(() => [image.getBoundingClientRect().width, image.naturalWidth])"
        )
        text = page.request.get(str(picture.evaluate("image => image.src"))).text()
        sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)px"', text)]
        assert min(sizes) * shown / natural >= pixels, source
    page.close()


def test_tables_of_few_columns_fit_a_phone_on_every_page(site: Path, address: str, browser: Browser) -> None:
    width, height = SIZES["phone"]
    names = [path.relative_to(site).with_suffix("").as_posix() for path in sorted(site.rglob("*.html"))]
    page = browser.new_page(viewport={"width": width, "height": height}, java_script_enabled=False)
    wide = "all => all.filter(t => t.rows[0].cells.length <= 6 && t.scrollWidth > t.clientWidth + 1).length"
    found = set()
    for name in names:
        page.goto(f"{address}/{name}.html", wait_until="load")
        if page.locator("article table").evaluate_all(wide):
            found.add(name)
    page.close()
    assert len(names) > 200
    assert found <= WIDE_PAGES
