"""Verdicts on the claims of papers, based on tests against each rival.

A rival is one of the methods, variants or numbers that the subject of the claim is compared with. For each rival, there
is one number per seed: the difference in the claimed direction, averaged over variants and paired by seed (the same
seed gives the same data, cohorts, initial model and batches). The differences are tested by t-tests with Holm's
correction over the claim's rivals. If a claim is about each variant (such as every attack), a method counts as a
separate rival in each variant. A claim holds if the subject is clearly ahead of every rival. A claim does not hold if
at least one rival is clearly ahead. A large lead over one rival therefore cannot make up for a loss to another. A claim
is tested after 5, 10 and 20 seeds, at levels of 1, 1.5 and 2.5 %, which add up to 5 % (Bonferroni). The first of these
interim tests (looks) whose result is significant settles the claim. Claims of equivalence are tested by two one-sided
tests. Claims about standard deviations over seeds are judged in the same way, with each value replaced by its distance
from the median over seeds (Brown-Forsythe test). Comparisons with individual rivals in
individual variants are tested separately, with Holm's correction over the entire recipe. If one of them clearly
contradicts the claim, the claim holds only in part. Variances, work and traffic are compared by ratios, as in the
papers' claims. On this logarithmic scale, a single extreme seed cannot dominate a mean. A difference's interval uses
the significance level of its interim test and of its step in Holm's procedure, so this interval decides the test.
Verdicts apply to the paper's samples with other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedloom.formats import format_significant
from fedloom.lab.report import log_ratio
from fedloom_studies.reproduce.cells import Numbers, finite_by_seed, printed_mean_and_std
from fedloom_studies.reproduce.figures import Reference, get_unit
from fedloom_studies.reproduce.looks import (
    EQUAL_MEANS_TOLERANCE,
    FAILS,
    HOLDS,
    LOOK_LEVELS,
    PARTLY,
    UNDECIDED,
    UNTESTED,
    ClaimVerdict,
    InterimTest,
    UntestedReason,
    claim_words,
    decide_looks,
    first_deciding_look,
    look_at,
)
from fedloom_studies.reproduce.recipe import Claim, Recipe


@dataclass(frozen=True)
class ClaimPair:
    """Comparison of a claim's subject with one rival in one variant.

    The verdict on the comparison includes Holm's correction.
    """

    left: str
    right: str
    look: InterimTest


@dataclass(frozen=True)
class ClaimRival:
    """Method, variant or number that the subject of a claim is compared with.

    Attributes:
        name: name of the rival. The name includes the variant only if variants differ or the claim refers to each
            variant.
        look: test of its differences (one per seed) at the interim look that settles the claim.
        is_significant: True if the difference is significant by Holm's procedure over the rivals of the claim.
    """

    name: str
    look: InterimTest
    is_significant: bool

    @property
    def verdict(self) -> ClaimVerdict:
        """Verdict on the claim with respect to this rival alone."""
        return self.look.verdict if self.is_significant else UNDECIDED


@dataclass(frozen=True)
class JudgedClaim:
    """A claim, with tests against each rival, and its individual comparisons.

    Attributes:
        claim: claim that the paper makes.
        figure: figure of the claim.
        rivals: rivals that were run at least once.
        comparisons: all individual comparisons, one for each rival and variant.
        planned: number of comparisons that the recipe plans.
        missing_results: number of comparisons that were run even though one of the two methods has no result.
    """

    claim: Claim
    figure: str
    rivals: tuple[ClaimRival, ...]
    comparisons: tuple[ClaimPair, ...]
    planned: int
    missing_results: int = 0

    @property
    def reason(self) -> UntestedReason | None:
        """Reason why the claim was not tested. None if the claim is tested."""
        return None if self.measured else UntestedReason.LOST if self.missing_results else UntestedReason.NOT_RUN

    @property
    def words(self) -> str:
        """Verdict as text for readers, with the reason if the claim is not tested."""
        return claim_words(self.verdict, self.reason)

    @property
    def verdict(self) -> ClaimVerdict:
        """Verdict on the entire claim.

        The claim holds if it holds against every rival. A claim holds in part if it holds against some rivals and no
        rival is ahead, or if a single comparison contradicts a claim that otherwise holds.
        """
        if self.reason:
            return UNTESTED
        word = decide_claim(self.claim, self.rivals)
        against = any(c.look.verdict == FAILS for c in self.measured)
        return PARTLY if word == HOLDS and against and not self.claim.most else word

    @property
    def closest_rival(self) -> ClaimRival:
        """The rival that comes closest to contradicting the claim.

        This rival has the smallest difference or, if equivalence is claimed, the largest.

        If the claim does not hold, it is a rival that clearly contradicts it.
        """
        against = [r for r in self.rivals if r.verdict == FAILS] if self.verdict == FAILS else []
        return min(
            against or self.rivals,
            key=lambda r: -abs(r.look.difference) if self.claim.equivalent else r.look.difference,
        )

    @property
    def measured(self) -> list[ClaimPair]:
        """Comparisons that were run with at least one seed."""
        return [c for c in self.comparisons if c.look.n]

    @property
    def right(self) -> int:
        """Number of comparisons whose mean is in the claimed direction."""
        return sum(has_claimed_direction(self.claim, c.look.difference) for c in self.measured)

    @property
    def count(self) -> str:
        """Text that counts the comparisons that hold as claimed, are clearly for or against it, or have no result."""
        rest = self.planned - len(self.measured) - self.missing_results
        clear = [sum(c.look.verdict == v for c in self.measured) for v in (HOLDS, FAILS)]
        alone = f", {clear[0]} of them clearly" if clear[0] else ""
        against = f", {clear[1]} clearly {'contradicts' if clear[1] == 1 else 'contradict'} it" if clear[1] else ""
        tested = "" if self.claim.construction else alone + against
        left = "".join(
            f", {n} {word}"
            for n, word in ((self.missing_results, UntestedReason.LOST), (rest, UntestedReason.NOT_RUN))
            if n
        )
        return f"{self.right} of {len(self.measured)} comparisons favor the claim{tested}{left}"

    @property
    def summary(self) -> str:
        """Verdict, followed by the number of comparisons."""
        if not self.measured:
            return self.words
        return f"{self.verdict} by construction" if self.claim.construction else f"{self.verdict} ({self.count})"


def decide_claim(claim: Claim, rivals: Sequence[ClaimRival]) -> ClaimVerdict:
    """Return the verdict on a claim, given the verdicts against its rivals."""
    words = [rival.verdict for rival in rivals]
    held, failed = words.count(HOLDS), words.count(FAILS)
    if claim.most:
        return HOLDS if 2 * held > len(words) else FAILS if failed and 2 * failed >= len(words) else UNDECIDED
    if failed:
        return FAILS
    return UNDECIDED if not held else HOLDS if held == len(words) else PARTLY


def judge_claims(recipe: Recipe, numbers: Numbers) -> list[JudgedClaim]:
    """Judge all claims of a recipe. Holm's procedure corrects individual comparisons over the entire recipe."""
    pairs = [[(pair, _leads_by_seed(claim, *pair, numbers)) for pair in _claim_pairs(recipe, claim, numbers)]
             for claim in recipe.paper.claims]  # fmt: skip
    looks = [[first_deciding_look(claim, recipe.ordered(lead), lead) for _, lead in pairs_of_claim]
             for claim, pairs_of_claim in zip(recipe.paper.claims, pairs, strict=True)]  # fmt: skip
    places = [
        (i, k)
        for i, pairs_of_claim in enumerate(looks)
        for k, look in enumerate(pairs_of_claim)
        if math.isfinite(look.p)
    ]
    clear = dict(zip(places, decide_looks([looks[i][k] for i, k in places]), strict=True))
    verdicts = []
    for i, (claim, pairs_of_claim) in enumerate(zip(recipe.paper.claims, pairs, strict=True)):
        singles = tuple(
            ClaimPair(_side_name(left), _side_name(right), _single_verdict(*clear.get((i, k), (look, True))))
            for k, (((left, right), _), look) in enumerate(zip(pairs_of_claim, looks[i], strict=True))
        )
        planned = len(_claim_pairs(recipe, claim, {variant: {} for variant in recipe.variants}))
        figure = Reference.create(claim.subject, recipe.paper.figure).figure
        lost = sum(not lead and any(_has_no_value(side, numbers) for side in pair) for pair, lead in pairs_of_claim)
        verdicts.append(JudgedClaim(claim, figure, _test_rivals(recipe, claim, pairs_of_claim), singles, planned, lost))
    return verdicts


def _single_verdict(look: InterimTest, clear: bool) -> InterimTest:
    return look if clear else replace(look, verdict=UNDECIDED)


def _test_rivals(
    recipe: Recipe, claim: Claim, pairs_of_claim: Sequence[tuple[tuple[Reference, Side], Mapping[str, float]]]
) -> tuple[ClaimRival, ...]:
    """Test a claim against its rivals at the first interim look that settles it, otherwise at the last look."""
    by_rival: dict[str, list[Mapping[str, float]]] = {}
    for (left, right), lead in pairs_of_claim:
        if lead:
            by_rival.setdefault(_rival_name(claim, left, right), []).append(lead)
    if not by_rival:
        return ()
    means = {name: _mean_over_variants(leads) for name, leads in by_rival.items()}
    seeds = recipe.ordered(set.intersection(*(set(mean) for mean in means.values())))
    rivals = _test_at_look(claim, means, seeds, math.nan)
    for n, level in LOOK_LEVELS:
        if len(seeds) < n or decide_claim(claim, rivals) in (HOLDS, FAILS):
            break
        rivals = _test_at_look(claim, means, seeds[:n], level)
    return rivals


def _test_at_look(
    claim: Claim, means: Mapping[str, Mapping[str, float]], seeds: Sequence[str], level: float
) -> tuple[ClaimRival, ...]:
    """Test the subject of a claim against its rivals, using the given seeds and level."""
    looks = {name: look_at(claim, [mean[seed] for seed in seeds], level) for name, mean in means.items()}
    if claim.construction and seeds:
        least = {name: min(mean[seed] for seed in seeds) for name, mean in means.items()}
        verdicts = {name: HOLDS if least[name] >= -EQUAL_MEANS_TOLERANCE else FAILS for name in looks}
        return tuple(
            ClaimRival(name, replace(look, verdict=verdicts[name]), is_significant=True) for name, look in looks.items()
        )
    if any(math.isnan(look.p) for look in looks.values()):
        return tuple(ClaimRival(name, look, is_significant=False) for name, look in looks.items())
    return tuple(ClaimRival(name, *one) for name, one in zip(looks, decide_looks([*looks.values()]), strict=True))


def _mean_over_variants(leads: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over variants of the differences, for each seed that all variants have."""
    common = set.intersection(*(set(lead) for lead in leads)) if leads else set[str]()
    return {seed: float(np.mean([lead[seed] for lead in leads])) for seed in common}


def compare_references(
    recipe: Recipe, left: Mapping[str, float | None], right: Mapping[str, float | None], *, log: bool = False
) -> InterimTest:
    """Compare two references seed by seed, either by their paired difference or by the logarithm of their ratio."""
    a, b = finite_by_seed(left), finite_by_seed(right)
    subtract = log_ratio if log else float.__sub__
    lead = {seed: subtract(float(a[seed]), float(b[seed])) for seed in a.keys() & b.keys()}
    return first_deciding_look(Claim(text="", higher="left", than=("right",)), recipe.ordered(lead), lead)


def judge_at_validation(recipe: Recipe, verdict: JudgedClaim, numbers: Numbers) -> JudgedClaim | None:
    """Return the verdict at the round that is best on validation data, or None if the claim specifies the round."""
    figure = recipe.paper.figure

    def chosen(side: str | float) -> str | float:
        reference = None if isinstance(side, float) else Reference.create(side, figure)
        at = reference.chosen() if reference else None
        return side if at is None else f"{at.variant} | {at}" if at.variant else str(at)

    claim = verdict.claim
    role = "lower" if claim.higher is None else "higher"
    moved = claim.with_(**{role: chosen(claim.subject), "than": tuple(chosen(side) for side in claim.than)})
    if moved == claim:
        return None
    (one,) = judge_claims(replace(recipe, paper=recipe.paper.with_(claims=(moved,))), numbers)
    return one if one.measured else None


def has_claimed_direction(claim: Claim, difference: float) -> bool:
    """Return True if a difference has the claimed direction, even if it is not significant."""
    if claim.equivalent:
        return abs(difference) <= claim.margin
    return difference >= -EQUAL_MEANS_TOLERANCE if claim.construction else difference > -claim.margin


def smallest_printed_lead(recipe: Recipe, claim: Claim) -> float:
    """Return the smallest mean lead over a rival that the paper prints, in the claimed direction, or NaN if none."""
    texts = {Reference.create(text, recipe.paper.figure)._replace(variant=""): k
             for k, text in enumerate(recipe.paper.columns.values())}  # fmt: skip
    cells = {
        variant: {
            str(ref): printed_mean_and_std(row[k], recipe.paper.percent)[claim.spread] for ref, k in texts.items()
        }
        for variant, row in recipe.paper.cells.items()
        if row
    }
    numbers = {v: {ref: {"0": value} for ref, value in row.items()} for v, row in cells.items()}
    by_rival: dict[str, list[float]] = {}
    for left, right in _claim_pairs(recipe, claim, numbers):
        if lead := _leads_by_seed(claim.with_(spread=False), left, right, numbers):
            by_rival.setdefault(_rival_name(claim, left, right), []).append(lead["0"])
    return min((float(np.mean(leads)) for leads in by_rival.values()), default=math.nan)


Side = Reference | float


def _claim_pairs(recipe: Recipe, claim: Claim, numbers: Numbers) -> list[tuple[Reference, Side]]:
    figure = recipe.paper.figure
    left = Reference.create(claim.subject, figure)
    rights: list[Side] = [Reference.create(side, figure) if isinstance(side, str) else side for side in claim.than]
    variants = claim.variants or tuple(recipe.variants)
    if left.variant:
        variants = (left.variant,)
    variants_run = [v for v in variants if v in numbers] if not left.variant else list(variants)
    return [
        (left._replace(variant=variant), _locate_side(variant, right)) for variant in variants_run for right in rights
    ]


def _has_no_value(side: Side, numbers: Numbers) -> bool:
    """Return True if a method was run, but has no value for any seed."""
    by_seed = numbers.get(side.variant, {}).get(str(side)) if isinstance(side, Reference) else None
    return by_seed is not None and not finite_by_seed(by_seed)


def _locate_side(variant: str, side: Side) -> Side:
    return side._replace(variant=side.variant or variant) if isinstance(side, Reference) else side


def _side_name(side: Side) -> str:
    if not isinstance(side, Reference):
        return format_significant(side, 6)
    return f"{side.variant} | {side}" if side.variant else str(side)


def _rival_name(claim: Claim, left: Reference, right: Side) -> str:
    """Return the name of a rival. The variant is included if it differs or if the claim is about each variant."""
    if claim.each:
        return _side_name(right) if isinstance(right, Reference) else f"{left.variant} | {_side_name(right)}"
    shared = isinstance(right, Reference) and right.variant == left.variant
    return _side_name(right._replace(variant="") if shared and isinstance(right, Reference) else right)


def _leads_by_seed(claim: Claim, left: Reference, right: Side, numbers: Numbers) -> dict[str, float]:
    """Return the difference for each seed that both sides have. It is positive in the claimed direction.

    If `Unit.ratio` is true, the difference is the logarithm of the ratio.
    """
    a = finite_by_seed(numbers.get(left.variant, {}).get(str(left), {}))
    b = (
        dict.fromkeys(a, right)
        if isinstance(right, float)
        else finite_by_seed(numbers.get(right.variant, {}).get(str(right), {}))
    )
    sign = 1.0 if claim.higher is not None else -1.0
    common = a.keys() & b.keys()
    if claim.spread:
        a, b = (_median_distances({seed: values[seed] for seed in common}) for values in (a, b))
    subtract = log_ratio if get_unit(left.figure).compares_ratios and not claim.spread else float.__sub__
    return {seed: sign * subtract(float(a[seed]), float(b[seed])) for seed in common}


def _median_distances(by_seed: Mapping[str, float]) -> dict[str, float]:
    """Return the distance of each value from the median over seeds, keyed by seed."""
    centre = float(np.median(list(by_seed.values()))) if by_seed else math.nan
    return {seed: abs(value - centre) for seed, value in by_seed.items()}
