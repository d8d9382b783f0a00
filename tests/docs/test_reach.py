"""Access for everyone, as checked without a browser: names, headings, landmarks, contrast and labels of charts."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedloom.lab.report.charts import look

ROOT = Path(__file__).resolve().parents[2]
SVG_FILES = [path for folder in ("docs", "studies/pages") for path in sorted((ROOT / folder).rglob("*.svg"))]
CHECKED_PAGES = ("index.html", "start.html", "papers.html", "map.html", "gallery.html", "methods/flame.html")
CONTRAST_TEXT = 4.5
"""Smallest contrast of text by WCAG 2, level AA."""
CONTRAST_MARK = 3.0
"""Smallest contrast of a mark in a chart by WCAG 2, level AA."""


class Reader(HTMLParser):
    """Reader of a page: headings, landmarks, ids, and elements without a name."""

    def __init__(self) -> None:
        super().__init__()
        self.headings, self.ids, self.nameless, self.tags = list[int](), list[str](), list[str](), list[str]()
        self.language = ""
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a start tag."""
        values = dict(attrs)
        self.tags.append(tag)
        if tag == "html":
            self.language = values.get("lang") or ""
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "img":
            if "alt" not in values:
                self.nameless.append(f"img {values.get('src')}")
            for _, _, words in self.open:
                words.append(values.get("alt") or "")
        if tag in ("a", "button"):
            self.open.append((tag, values, []))

    def handle_data(self, data: str) -> None:
        """Record text as part of the name of the open links and buttons."""
        for _, _, words in self.open:
            words.append(data)

    def handle_endtag(self, tag: str) -> None:
        """Record a link or button without a name."""
        if self.open and self.open[-1][0] == tag:
            _, values, words = self.open.pop()
            named = "".join(words).strip() or values.get("aria-label") or values.get("title")
            if not named and "href" in values:
                self.nameless.append(f"{tag} {values['href']}")
            elif not named and tag == "button":
                self.nameless.append(f"{tag} {values.get('class')}")


def read(text: str) -> Reader:
    """Return what a reader finds in a page."""
    reader = Reader()
    reader.feed(text)
    return reader


def luminance(color: str) -> float:
    """Return the relative luminance of a color by WCAG 2."""
    channels = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors by WCAG 2, from 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def faults(text: str) -> list[str]:
    """Return the faults of a page."""
    found = read(text)
    jumps = [f"h{a} is followed by h{b}" for a, b in zip(found.headings, found.headings[1:], strict=False) if b > a + 1]
    twice = [f"id {name} stands twice" for name in sorted(set(found.ids)) if found.ids.count(name) > 1]
    landmarks = [f"no {tag}" for tag in ("main", "nav", "header") if tag not in found.tags]
    top = [] if found.headings.count(1) == 1 else [f"{found.headings.count(1)} headings of level 1"]
    language = [] if found.language else ["no language"]
    return [*jumps, *twice, *landmarks, *top, *language, *(f"no name: {one}" for one in found.nameless)]


@pytest.mark.parametrize("name", CHECKED_PAGES)
def test_a_page_has_names_headings_in_order_and_landmarks(site: Path, name: str) -> None:
    assert faults((site / name).read_text()) == []


def test_faults_are_found() -> None:
    page = (
        '<html><main><h1>a</h1><h3 id="x">b</h3><p id="x"></p><img src="c.svg"><a href="d"><b></b></a></main>'
        "<button class='e'></button>"
    )
    assert faults(page) == [
        "h1 is followed by h3", "id x stands twice", "no nav", "no header", "no language", "no name: img c.svg",
        "no name: a d", "no name: button e",
    ]  # fmt: skip
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("path", SVG_FILES, ids=lambda path: path.name)
def test_no_label_of_a_chart_is_hidden_or_cut(path: Path) -> None:
    for element in ElementTree.parse(path).iter():
        if element.tag.endswith("}text") and "".join(element.itertext()).strip():
            assert float(element.get("opacity", "1")) > 0, "".join(element.itertext())
            assert not "".join(element.itertext()).endswith("…"), "".join(element.itertext())


def test_colors_of_charts_stand_out_from_both_grounds() -> None:
    for ground in ("#ffffff", "#1e2129"):
        for color in (look.BLUE_COLOR, look.ORANGE_COLOR, look.GREY_COLOR):
            assert contrast(color, ground) >= CONTRAST_MARK, (color, ground)


def test_texts_of_the_report_stand_out_from_their_grounds() -> None:
    style = (ROOT / "packages/fedloom/src/fedloom/lab/report/page.css").read_text()
    themes = re.findall(r"\{([^{}]*--ink:[^{}]*)\}", style)
    assert len(themes) >= 2
    for theme in themes:
        colors = dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6})", theme))
        for text in ("ink", "soft", "accent", "global", "personal", "hybrid"):
            for ground in ("paper", "raised"):
                least = CONTRAST_TEXT if text in ("ink", "soft", "accent") else CONTRAST_MARK
                assert contrast(colors[text], colors[ground]) >= least, (text, ground)
        assert contrast(colors["warn"], colors["warn-paper"]) >= CONTRAST_TEXT
