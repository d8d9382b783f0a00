"""The search of the site finds the right page for the words that people type."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest

TERMS = {
    "hyperparameter": {"tuning"},
    "learning rate": {"tuning", "reference/local", "start"},
    "non-IID": {"data-clients", "concepts"},
    "client drift": {"concepts", "glossary"},
    "early stopping": {"track-runs"},
    "logging": {"track-runs"},
    "tensorboard": {"track-runs"},
    "reverse proxy": {"deploy-servers"},
    "troubleshooting": {"troubleshooting"},
    "FAQ": {"troubleshooting"},
    "save model": {"models"},
    "custom dataset": {"data-images"},
    "GPU": {"gpu"},
    "CSV": {"data", "notebooks/compare-csv"},
    "Dirichlet": {"data-clients", "reference/partition"},
    "differential privacy": {"differential-privacy"},
    "secure aggregation": {"secure-aggregation"},
    "significance test": {"compare", "tuning"},
    "baseline": {"compare"},
    "LoRA": {"text"},
    "batch normalization": {"models"},
    "ONNX": {"models"},
    "Cox regression": {"statistics", "deploy-cox"},
    "Flower app": {"flower"},
    "PFLlib": {"coming-from"},
    "Prometheus": {"deploy-operate"},
    "docker": {"deploy-servers"},
    "custom loss": {"user-code"},
    "out of memory": {"troubleshooting", "gpu", "scale"},
    "cross-validation": {"clinical", "data-clients"},
}
"""Words, and the pages of which one must be among the first three."""
TITLE_BOOST = 1000
"""Weight of a word in a title against one in the text, as in the theme's search."""


def tokens(text: str) -> list[str]:
    """Return the words of a text in small letters, as the theme's search splits them, without a plural s."""
    return [re.sub(r"(?<=\w\w\w)s$", "", word) for word in re.split(r"[^\w]+", text.lower()) if word]


Entry = tuple[str, list[str], list[str]]
"""A page, and the words of a title and of the text below it."""


def first_pages(entries: list[Entry], query: str, count: int = 3) -> list[str]:
    """Return the first pages of a search: all words must occur, and titles weigh more (BM25 on both fields)."""
    mean = {k: sum(len(entry[k]) for entry in entries) / len(entries) for k in (1, 2)}
    scores: dict[str, float] = defaultdict(float)
    total: dict[int, float] = defaultdict(float)
    for word in tokens(query):
        counts = {k: [sum(one.startswith(word) for one in entry[k]) for entry in entries] for k in (1, 2)}
        found = [a + b > 0 for a, b in zip(counts[1], counts[2], strict=True)]
        rarity = math.log(1 + (len(entries) - sum(found) + 0.5) / (sum(found) + 0.5))
        for place, entry in enumerate(entries):
            if not found[place]:
                total[place] = -math.inf
            for k, boost in ((1, TITLE_BOOST), (2, 1)):
                n = counts[k][place]
                total[place] += (
                    boost * rarity * n * 2.2 / (n + 1.2 * (0.25 + 0.75 * len(entry[k]) / mean[k])) if n else 0
                )
    for place, (page, *_) in enumerate(entries):
        scores[page] = max(scores[page], total[place])
    ranked = sorted((page for page in scores if scores[page] > 0), key=scores.__getitem__, reverse=True)
    return [page.removesuffix(".html") for page in ranked[:count]]


@pytest.fixture(scope="module")
def index(site: Path) -> list[Entry]:
    found: list[dict[str, str]] = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    return [(e["location"].partition("#")[0], tokens(e["title"]), tokens(re.sub(r"<[^>]+>", " ", e["text"])))
            for e in found]  # fmt: skip


@pytest.mark.parametrize("query", TERMS)
def test_a_search_finds_its_page(query: str, index: list[Entry]) -> None:
    pages = first_pages(index, query)
    assert TERMS[query] & {*pages}, pages


def test_a_word_of_no_page_finds_nothing(index: list[Entry]) -> None:
    assert first_pages(index, "zzzyx") == []
