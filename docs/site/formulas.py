"""Formulas as MathML, which browsers set by themselves: nothing is fetched, and screen readers read it."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

from latex2mathml.converter import convert

FILE = Path(__file__).with_name("formulas.toml")
GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "lambda", "mu", "xi", "pi", "rho", "sigma", "tau"),
    *("upsilon", "phi", "psi", "omega", "Delta"),
)
BELOW, ABOVE = r"(?:_(\{[^}]+\}|[A-Za-z0-9]+))?", r"(?:\^(\([^)]+\)|[A-Za-z0-9]+))?"
SYMBOL = re.compile(rf"(v-bar|w~|eta~|[A-Za-z]+?){BELOW}{ABOVE}")
ACCENTS = {
    "Dw": "D w",
    "v-bar": r"\bar v",
    "xbar": r"\bar x",
    "xhat": r"\hat x",
    "w~": r"\tilde w",
    "eta~": r"\tilde \eta",
}


def display(tex: str) -> str:
    """A formula of its own, in a box that scrolls sideways where a screen is narrow."""
    return f'<div class="formula" tabindex="0" role="region" aria-label="Formula">{convert(tex, display="block")}</div>'


def inline(tex: str) -> str:
    """A formula within a line."""
    return convert(tex)


@cache
def problems() -> dict[str, dict[str, str]]:
    """TeX of the problem of every method, and what is said beside it."""
    return tomllib.loads(FILE.read_text())


def symbols(plain: str) -> str | None:
    """A list of symbols in the plain letters of a card, set as formulas; None where it is something else.

    >>> symbols("eta, E").count("<math"), symbols("w, not BN")
    (2, None)
    """
    found = [_symbol(part) for part in plain.split(", ")]
    return ", ".join(inline(tex) for tex in found if tex) if all(found) else None


def _symbol(plain: str) -> str | None:
    match = SYMBOL.fullmatch(plain)
    if match is None:
        return None
    base, below, above = match.groups()
    tex = ACCENTS.get(base) or (rf"\{base}" if base in GREEK else base)
    if tex == base and len(base) > 1:
        return None
    return tex + (f"_{{{_names(below)}}}" if below else "") + (f"^{{{_names(above)}}}" if above else "")


def _names(text: str) -> str:
    inner = text.strip("{}()")
    if inner.isalpha() and len(inner) > 2:
        return rf"\{inner}" if inner in GREEK else rf"\text{{{inner}}}"
    return re.sub(r"([a-z])_([a-z])", r"\1_{\2}", inner)
