"""What mkdocs calls while it builds: the pages that are made from the code and from recorded results."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import choosing
import methods
import notebooks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
STUDIES = ROOT / "studies" / "pages"
ROOT_PAGES = ("CONTRIBUTING", "CHANGELOG", "SECURITY")
"""Pages at the root of the repository that the site has too."""
METHODS = "packages/fedloom/src/fedloom/algorithms/"
"""Folder of the methods' files."""
WIDE = 10
"""Columns that a table has beside a table of contents."""
CELL = re.compile(r"<(t[dh])\b.*?</\1>", re.DOTALL)
LONG_WORD = re.compile(r"[^\s<>]{9,}(?![^<>]*>)")
"""Text between tags that would make a column too wide for a phone."""
BREAK = re.compile(r"""(?<=[A-Za-z0-9)"'][_./=@,:(\[-])(?=[\w"'\[])""")
"""Places where a browser may break a long word."""


def pages() -> Iterator[tuple[str, str]]:
    """Path and content of every page that is made."""
    yield from methods.pages()
    yield "choosing.md", choosing.page()
    yield from notebooks.pages()
    yield "mutants.md", (ROOT / "tests" / "mutants.md").read_text()
    for name in ROOT_PAGES:
        yield f"{name.lower()}.md", (ROOT / f"{name}.md").read_text()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the place of the methods in the navigation."""
    for entry in config["nav"]:
        if entry.get("Methods") == "methods/":
            entry["Methods"] = methods.navigation()
    return config


def on_page_markdown(markdown: str, page: Page | None = None, **more: object) -> str:
    """Links as they are on the site: ``docs`` and ``studies/pages`` are one folder, and a method's file is its page.

    In the repository they lead to files that are there: ``docs``, ``studies/pages`` and the code of the methods. A page
    with a table of many columns has the room of the table of contents too.
    """
    columns = [rule.count("|") - 1 for rule in re.findall(r"^\|(?:-+:?\|)+$", markdown, re.MULTILINE)]
    if page is not None and max(columns, default=0) > WIDE:
        page.meta.setdefault("hide", ["toc"])
    made = re.sub(r"\]\((?:\.\./studies/pages|studies/pages|\.\./\.\./docs|docs|site|tests)/", "](", markdown)
    made = re.sub(r"\]\(\.\./\.\./\.\./docs/", "](../", made)
    made = re.sub(rf"\]\((?:\.\./)+{METHODS}(\w*)(?:\.py)?(?:#([\w-]+))?", methods.link, made)
    return re.sub(rf"\]\(\.\./({'|'.join(ROOT_PAGES)})\.md", lambda found: f"]({found[1].lower()}.md", made)


def on_page_content(html: str, **more: object) -> str:
    """Tables and code scroll by the keyboard too, on a phone charts of the gallery; a head without a word is a cell."""
    count, charts = itertools.count(1), itertools.count(1)
    begin = '<div class="scrolls" tabindex="0" role="region" aria-label="Table {}"><table>'
    chart = '<span class="scrolls chart" tabindex="0" role="region" aria-label="Chart {}">{}</span>'
    html = re.sub(r'<img [^>]*src="gallery/[^>]*>', lambda found: chart.format(next(charts), found[0]), html)
    html = html.replace("<pre><span></span><code>", '<pre><span></span><code tabindex="0">')
    html = re.sub("<table>", lambda _: begin.format(next(count)), html.replace("<th></th>", "<td></td>"))
    return html.replace("</table>", "</table></div>")


def on_post_page(output: str, **more: object) -> str:
    """What the theme leaves without a name for screen readers; a menu within a menu is no landmark.

    Code in tables may break after punctuation. The search index is made before, so it contains whole words.
    """
    open_tags: list[bool] = []

    def renamed(found: re.Match[str]) -> str:
        tag = found[0]
        if tag == "</nav>":
            return "</div>" if open_tags.pop() else tag
        open_tags.append("data-md-level" in tag and 'data-md-level="0"' not in tag)
        group = re.sub(' aria-expanded="[a-z]+"', "", tag).replace("<nav ", '<div role="group" ')
        return group if open_tags[-1] else tag

    output = CELL.sub(lambda cell: LONG_WORD.sub(lambda word: BREAK.sub("<wbr>", word[0]), cell[0]), output)
    return re.sub(r"<nav\b[^>]*>|</nav>", renamed, output.replace('role="dialog"', 'role="dialog" aria-label="Search"'))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made, and the pages of the studies with their pictures and tables."""
    for path, content in pages():
        files.append(File.generated(config, path, content=content))
    for file in sorted(STUDIES.rglob("*.*")):
        path = file.relative_to(STUDIES).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(file)))
    return files
