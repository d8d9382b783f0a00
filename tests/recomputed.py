"""Every verdict on the map and on the papers again, from the records alone, by NumPy, SciPy and pandas.

It shares no code with the judges: it reads the JSON lines of ``studies/results``, and takes claims as plain tables.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import optimize, special, stats

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "studies" / "results"
MODERATED, PLAIN = 0.025, 0.05


# --- tests


def holm(p: Sequence[float], level: float) -> tuple[np.ndarray, np.ndarray]:
    """Whether each is rejected, and the level at which it is decided."""
    ranks = pd.Series(p).rank(method="first").to_numpy().astype(int) - 1
    ordered, count = np.sort(p), len(p)
    passes = ordered <= level / (count - np.arange(count))
    rejected = count if passes.all() else int(np.argmin(passes))
    return ranks < rejected, level / (count - np.minimum(ranks, rejected))


def prior(variances: np.ndarray, degrees: int) -> tuple[float, float]:
    """s0^2 and d0 by the moments of log s^2 (Smyth 2004), all with the same degrees of freedom."""
    floored = np.maximum(variances, 1e-5 * np.median(variances[variances > 0]))
    z = np.log(floored)
    excess = z.var(ddof=1) - special.polygamma(1, degrees / 2)
    if excess <= 0:
        return float(np.exp(z.mean() - special.digamma(degrees / 2) + math.log(degrees / 2))), math.inf
    half = optimize.brentq(lambda x: special.polygamma(1, x) - excess, 1e-4, 1e7)
    log = z.mean() - special.digamma(degrees / 2) + math.log(degrees / 2) + special.digamma(half) - math.log(half)
    return float(np.exp(log)), 2 * half


class Moderated(NamedTuple):
    """A family of moderated tests: means, half widths of the deciding intervals, and rejections ``[k]``."""

    mean: np.ndarray
    half: np.ndarray
    rejected: np.ndarray
    spread: float
    needed: int


class Shrunk(NamedTuple):
    """Moderated t tests of the rows of a table: standard errors and p-values ``[k]``, and the prior s0^2, d0."""

    error: np.ndarray
    degrees: float
    p: np.ndarray
    common: float
    d0: float


def shrink(table: np.ndarray) -> Shrunk:
    """Test the rows of differences ``[k, n]``, each for itself."""
    (k, n), varied = table.shape, np.abs(table).max(1) > 0
    s2 = table.var(axis=1, ddof=1)
    common, d0 = prior(s2[varied], n - 1)
    degrees = min(d0 + n - 1, varied.sum() * (n - 1))
    shrunk = np.full(k, common) if math.isinf(d0) else (d0 * common + (n - 1) * s2) / (d0 + n - 1)
    error = np.sqrt(shrunk / n)
    p = np.where(varied, 2 * stats.t.sf(np.abs(table.mean(1)) / error, degrees), 1.0)
    return Shrunk(error, degrees, p, common, d0)


def moderated(table: np.ndarray, wanted: float = 0.03, power: float = 0.8) -> Moderated:
    """Test the rows of differences ``[k, n]``."""
    (k, n), varied = table.shape, np.abs(table).max(1) > 0
    error, degrees, p, common, d0 = shrink(table)
    rejected, level = holm(p, MODERATED)
    seeds = 2
    while True:
        df = min(seeds - 1 + d0, max(varied.sum() * (n - 1), seeds - 1))
        if stats.nct.sf(stats.t.isf(MODERATED / k / 2, df), df, wanted / math.sqrt(common / seeds)) >= power:
            break
        seeds += 1
    return Moderated(table.mean(1), stats.t.isf(level / 2, degrees) * error, rejected, math.sqrt(common), seeds)


# --- the map


def map_means(protocol: str = "rounds") -> pd.DataFrame:
    """Mean over clients by setup, method and seed; cells that repeat those of equal rounds have their figures."""
    rows = []
    for line in (RECORDS / "map-full.jsonl").read_text().splitlines():
        record = json.loads(line)
        for seed, series in record["seeds"].items() if record["status"] == "done" else ():
            rows.append((record["protocol"], record["setup"], record["method"], int(seed),
                         np.nanmean(np.array(series[0], float))))  # fmt: skip
        if record["status"] == "reused":
            rows.append((record["protocol"], record["setup"], record["method"], -1, math.nan))
    every = pd.DataFrame(rows, columns=["protocol", "setup", "method", "seed", "mean"])
    own, first = every[every.protocol == protocol], every[every.protocol == "rounds"]
    reused = own[own.seed == -1][["setup", "method"]]
    return pd.concat([own[own.seed >= 0], first.merge(reused)])


class MapVerdicts(NamedTuple):
    """What is decided in a setup: the better of local and FedAvg, and verdicts and gains of all others by method."""

    reference: str
    verdicts: dict[str, str]
    gains: dict[str, tuple[float, float]]
    means: dict[str, np.ndarray]
    spread: float
    needed: int


def judge_setup(rows: pd.DataFrame) -> MapVerdicts:
    """Judge the rows of a setup with columns method, seed and mean."""
    table = rows.pivot(index="method", columns="seed", values="mean").dropna(axis=1)  # seeds that every method has
    reference = max(("local", "fedavg"), key=lambda m: (table.loc[m].mean(), m == "local"))
    gaps = table.drop(index=reference) - table.loc[reference]
    family = moderated(gaps.to_numpy())
    words = np.where(family.rejected, np.where(family.mean > 0, "better", "worse"), "inconclusive")
    gains = {m: (float(a), float(b)) for m, a, b in zip(gaps.index, family.mean, family.half, strict=True)}
    verdicts = dict(zip(gaps.index, map(str, words), strict=True))
    means = {m: values.to_numpy() for m, values in table.iterrows()}
    return MapVerdicts(reference, verdicts, gains, means, family.spread, family.needed)


# --- the papers

LOOKS = ((5, 0.01), (10, 0.015), (20, 0.025))


class Side(NamedTuple):
    """A reference ``[VARIANT |] METHOD: MODEL[: FIGURE]``."""

    variant: str
    key: str

    @classmethod
    def create(cls, text: str, figure: str) -> Side:
        variant, _, rest = text.rpartition("|")
        parts = [part.strip() for part in rest.split(":")]
        return cls(variant.strip(), ": ".join(parts + [figure] * (len(parts) == 2)))


def is_log(figure: str) -> bool:
    """Whether a figure is compared by ratios."""
    name = figure.partition("@")[0]
    return name.startswith(("samples_", "bytes_")) or name.endswith("/variance")


def pairs_of(claim: Mapping[str, Any], figure: str, variants: Sequence[str]) -> Iterator[tuple[Side, Side | float]]:
    """The comparisons of a claim."""
    subject = Side.create(claim.get("higher") or claim["lower"], figure)
    wanted = [subject.variant] if subject.variant else [v for v in claim.get("variants") or variants if v in variants]
    for variant in wanted:
        for than in claim["than"]:
            other = Side.create(than, figure) if isinstance(than, str) else float(than)
            if isinstance(other, Side):
                other = other._replace(variant=other.variant or variant)
            yield subject._replace(variant=variant), other


def leads(claim: Mapping[str, Any], pair: tuple[Side, Side | float], numbers: Mapping[str, Any]) -> pd.Series:
    """Differences by seed in the claimed direction."""

    def values(side: Side) -> pd.Series:
        found = numbers.get(side.variant, {}).get(side.key, {})
        return pd.Series({int(s): v for s, v in found.items() if v is not None and math.isfinite(v)}, dtype=float)

    left = values(pair[0])
    right = values(pair[1]) if isinstance(pair[1], Side) else pd.Series(pair[1], index=left.index)
    both = pd.concat([left, right], axis=1, join="inner")
    if claim.get("spread"):
        both = (both - both.median()).abs()
    elif is_log(pair[0].key.rpartition(": ")[2]):
        both = np.log(both)
    return (both[0] - both[1]) * (1 if "higher" in claim else -1)


def one_look(values: np.ndarray, claim: Mapping[str, Any]) -> tuple[float, bool]:
    """Two-sided p of the nearer of claim and contradiction, and whether it is the claim."""
    margin, n = claim.get("margin", 0.0), len(values)
    error, mean = values.std(ddof=1) / math.sqrt(n), values.mean()

    def above(lead: float) -> float:
        return float(stats.t.sf(lead / error, n - 1)) if error else float(lead <= 0)

    right, wrong = above(mean + margin), above(-margin - mean)
    if not error:
        wrong = 1 - right
    if claim.get("equivalent"):
        right, wrong = max(right, above(margin - mean)), min(wrong, above(mean - margin))
    return min(1.0, 2 * min(right, wrong)), right < wrong


def shared(leads_by_pair: Sequence[pd.Series]) -> pd.Series:
    """The mean over comparisons by the seeds that all of them have."""
    return pd.concat(leads_by_pair, axis=1, join="inner").mean(axis=1)


def against_rivals(words: Sequence[str], claim: Mapping[str, Any]) -> str:
    """The verdict from those against each rival."""
    held, failed, count = words.count("holds"), words.count("does not hold"), len(words)
    if claim.get("most"):
        decided = "does not hold" if failed and 2 * failed >= count else "undecided"
        return "holds" if 2 * held > count else decided
    if failed:
        return "does not hold"
    return "undecided" if not held else "holds" if held == count else "holds in part"


def judge_claims(
    claims: Sequence[Mapping[str, Any]], figure: str, variants: Sequence[str], first: Sequence[int],
    numbers: Mapping[str, Any],
) -> dict[str, str]:  # fmt: skip
    """The verdict on every claim of a recipe by its text; claims without a result are left out.

    Args:
        claims: with the keys of the recipe's file.
        figure: of references without one.
        variants: of the recipe.
        first: the recipe's own seeds, which are looked at before all others.
        numbers: variant -> reference -> seed -> value.
    """
    recorded = {int(s) for by in numbers.values() for values in by.values() for s in values}
    seeds = [*first, *sorted(recorded - {*first})]
    verdicts, singles = dict[str, str](), list[tuple[str, float, bool]]()
    for claim in claims:
        by_rival = defaultdict[str, list[pd.Series]](list)
        for pair in pairs_of(claim, figure, [v for v in variants if v in numbers]):
            lead = leads(claim, pair, numbers)
            if not len(lead):
                continue
            own = isinstance(pair[1], Side) and pair[1].variant == pair[0].variant
            each = claim.get("each") or not own
            by_rival[str((pair[0].variant if claim.get("each") else "", pair[1] if each else pair[1][1]))].append(lead)
            if not claim.get("construction"):
                one = first_look(lead, seeds, claim)
                singles += [(claim["text"], *one)] if one else []
        if not by_rival:
            continue
        means = [shared(found) for found in by_rival.values()]
        common = [s for s in seeds if all(s in mean.index for mean in means)]
        verdicts[claim["text"]] = decide(claim, [mean.loc[common].to_numpy() for mean in means])
    rejected = holm([share for _, share, _ in singles], PLAIN)[0] if singles else []
    for (text, _, right), one in zip(singles, rejected, strict=True):
        claim = next(c for c in claims if c["text"] == text)
        if one and not right and verdicts.get(text) == "holds" and not claim.get("most"):
            verdicts[text] = "holds in part"
    return verdicts


def first_look(lead: pd.Series, seeds: Sequence[int], claim: Mapping[str, Any]) -> tuple[float, bool] | None:
    """The p of a comparison by itself, as a share of 5 % of its look's level, and whether it is as claimed."""
    values, found = lead.loc[[s for s in seeds if s in lead.index]].to_numpy(), None
    for n, level in LOOKS:
        if len(values) < n:
            break
        p, right = one_look(values[:n], claim)
        found = min(1.0, PLAIN * p / level), right
        if p <= level:
            break
    return found


def decide(claim: Mapping[str, Any], rivals: Sequence[np.ndarray]) -> str:
    """The verdict at the first look that decides."""
    if claim.get("construction"):
        return against_rivals(["holds" if r.min() >= -1e-9 else "does not hold" for r in rivals], claim)
    word = "undecided"
    for n, level in LOOKS:
        if len(rivals[0]) < n or word in ("holds", "does not hold"):
            break
        found = [one_look(r[:n], claim) for r in rivals]
        rejected, _ = holm([p for p, _ in found], level)
        words = [("holds" if right else "does not hold") if one else "undecided"
                 for one, (_, right) in zip(rejected, found, strict=True)]  # fmt: skip
        word = against_rivals(words, claim)
    return word
