"""The map: setups that can be drawn, judging by plain formulas, cells that resume, merge and say why they are empty."""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.linear_model import LogisticRegression
from statsmodels.stats.multitest import multipletests
from typer.testing import CliRunner

from fedloom.algorithms import REGISTRY
from fedloom.engine.setup import check
from fedloom.engine.simulate import simulate
from fedloom.errors import DataError
from fedloom.lab.cli import app
from fedloom.lab.experiment import Plan, parse
from fedloom.lab.experiment.cards import COUNTED_METHODS
from fedloom.lab.experiment.units.executors import EXECUTOR_KINDS
from fedloom.lab.report import MODERATED_LEVEL, fit_common_prior, required_seeds, run_family_tests
from fedloom.lab.tune import replace_params
from fedloom_studies.map import references
from fedloom_studies.map.budget import GradientBudget
from fedloom_studies.map.equal import changes_in_words, compare_protocols
from fedloom_studies.map.judge import (
    DETECTABLE_GAIN,
    DETECTION_PROBABILITY,
    SetupVerdict,
    compare_overall,
    indistinct_groups,
    judge_setup,
    largest_complete_block,
)
from fedloom_studies.map.measure import cells_to_run, estimate_setups
from fedloom_studies.map.page import map_pages, verdict_table
from fedloom_studies.map.records import (
    DONE_STATUS,
    FAILED_STATUS,
    NOT_APPLICABLE_STATUS,
    REUSED_STATUS,
    CellRecord,
    Series,
    fill_reused,
    read_records,
    record_cell,
)
from fedloom_studies.map.rules import advise_rule, rules_section
from fedloom_studies.map.setups import (
    REFERENCE_METHODS,
    Cell,
    Protocol,
    Setup,
    list_methods,
    read_setups,
    rule_cells,
    wider_heads,
    wider_setups,
)
from fedloom_studies.map.statements import advice_lines, recommended_method, setup_sentences
from fedloom_studies.map.wider import wider_section
from tests import commands, recomputed

ROOT = Path(__file__).resolve().parents[4]
FULL, SMOKE = read_setups("full"), read_setups("smoke")
PROTOCOLS: tuple[Protocol, ...] = ("rounds", "gradients")
OWN = '''"""Methods of a user."""

from fedloom.algorithms import Algorithm, Delta, Model
from fedloom.local import Ctx, Nothing, Work, descend


class Half(Algorithm):
    """Half a step."""

    def client(self, down: Model, rows: Nothing, work: Work) -> tuple[Delta, Nothing]:
        return Delta(FACTOR * (descend(down.x, work) - down.x)), rows

    def server(self, server: Model, up: Delta, ctx: Ctx) -> Model:
        return Model(server.x + up.dw)


class Refuses(Half):
    def check(self, *arguments, **more):
        from fedloom.errors import Refused
        raise Refused("this method wants no such clients")
'''


# --- what is measured


def test_other_words_in_a_method_s_file_are_the_same_code_and_another_number_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = {name: Cell(SMOKE["iid"], name).source for name in ("q-ffl", "flame", "fairfed")}
    plain = inspect.getsource

    def changed(*swaps: tuple[str, str]) -> dict[str, str]:
        def read(module: object) -> str:
            text = plain(module)  # type: ignore[arg-type]
            for pattern, text_ in swaps:
                text = re.sub(pattern, text_, text, flags=re.DOTALL)
            return text

        with monkeypatch.context() as patch:
            patch.setattr(inspect, "getsource", read)
            return {name: Cell(SMOKE["iid"], name).source for name in sources}

    words = (r'""".+?"""', '"""Other words."""'), (r'description="[^"]+"', 'description="other words"')
    assert changed(*words) == sources
    checked = (r"(def check\([^\n]+\n)", r"\1        print(self)\n"), (r"\nimport ", "\nimport zlib, ")
    assert changed(*checked) == sources
    one, other = (changed((r"\nclass ", rf'\nNOTE = "{word} sentence"\nclass ')) for word in ("one", "another"))
    assert one == other != sources
    assert all(changed((r"\b0\.5\b|\b1\b", "7"))[name] != source for name, source in sources.items())


def test_all_setups_fit_into_their_hours_and_no_seed_is_used_twice() -> None:
    assert sum(setup.share for setup in FULL.values()) <= 13.5 * 60
    assert sum(setup.decide_share(protocol) for setup in FULL.values() for protocol in PROTOCOLS) <= 24 * 60
    assert {setup.document["rounds"] for setup in FULL.values()} == {40}
    for setup in FULL.values():
        looks = [*setup.tuning, *setup.seeds, *setup.further, *setup.again]
        assert len(set(looks)) == len(looks) == 2 + 20 + 5
        counts = [len(stage) for stage in setup.stages]
        assert counts == [5, *setup.plan] == sorted({*counts})
        assert counts[-1] <= 20


@pytest.mark.parametrize("setup", FULL.values(), ids=lambda s: s.name)
def test_every_method_is_an_experiment_of_every_setup_with_the_same_trials(setup: Setup) -> None:
    for method in REGISTRY:
        plan = Cell(setup, method).plan
        tune = plan.tune
        assert (tune.trials, tune.seeds, tune.prune, tune.equal_work) == (setup.trials, setup.tuning, False, False)
        assert tune.rounds is None
        assert plan.methods[0].setting.rounds == setup.document["rounds"]


@pytest.mark.parametrize("setup", FULL.values(), ids=lambda s: s.name)
def test_every_setup_can_be_drawn_with_all_of_its_seeds(setup: Setup) -> None:
    plan = parse({**setup.document, "method": [{"algorithm": "fedavg"}]})
    try:
        data = plan.source.read(None)
    except DataError as missing:
        pytest.skip(str(missing))
    clients = {"hospitals": 4, "occupations": 14, "cross-device": 500}.get(setup.name, 20)
    for seed in (*setup.tuning, *setup.stages[-1], *setup.again):
        fed = plan.partition(data, seed)
        assert fed.n == clients
        for part in ("train", "validation", "test"):
            assert int(fed.sizes(part).min()) >= 1, (seed, part)
    if setup.name == "scarce":
        assert {int(sum(fed.sizes(p)[i] for p in ("train", "validation", "test"))) for i in range(20)} == {50}


@pytest.mark.parametrize("method", [name for name in REGISTRY if name != "fedbn"])
def test_no_method_is_another_one_on_the_map_for_lack_of_a_part(method: str) -> None:
    plan = Cell(FULL["labels"], method).plan
    fed = plan.partition(plan.source.read(None), 0)
    lacks = ("without a mixture", "without a memory", "without valve and embeddings")
    assert not [note for note in check(plan.methods[0].setting, fed) if any(words in note for words in lacks)]


# --- how it is judged


def record(setup: Setup, method: str, means: list[float], **more: object) -> CellRecord:
    """A record of four clients around a mean per seed."""
    spread = np.array([-0.02, -0.01, 0.01, 0.02])
    seeds = {
        str(seed): Series(
            (mean + spread).tolist(), [0, 4, 8], [0.1, 0.9 * mean, mean], [0.0, 400.0, 800.0], [0.0, 1.0, 2.0]
        )
        for seed, mean in enumerate(means)
    }
    made = CellRecord(setup.name, method, "rounds", "p", "s", {}, DONE_STATUS, "", 1.0, "2026-01-01", "c", "m",
                  metric="accuracy", model="global", seeds=seeds)  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def judged(**means: list[float]) -> SetupVerdict:
    setup = FULL["iid"]
    return judge_setup(setup, {(setup.name, m): record(setup, m, values) for m, values in means.items()})


def test_a_method_that_has_no_result_within_the_work_of_fedavg_has_no_figure_of_it() -> None:
    setup = FULL["iid"]
    cells = {(setup.name, m): record(setup, m, [0.8] * 5) for m in ("local", "fedavg", "fedavg-ft")}
    one = cells[setup.name, "fedavg-ft"]  # its fine-tuning before the first round costs more than all rounds of FedAvg
    costly = {seed: series._replace(gradients=[900.0, 1300.0, 1700.0]) for seed, series in one.seeds.items()}
    cells[setup.name, "fedavg-ft"] = replace(one, seeds=costly)
    standing = judge_setup(setup, cells).find("fedavg-ft")
    assert standing is not None
    assert math.isnan(standing.figures["mean_at_fedavg_work"].mean)
    assert "nan" not in dict(map_pages({"iid": setup}, cells))["iid.md"]


def test_figures_of_a_method_by_their_definitions() -> None:
    found = judged(local=[0.5] * 5, fedavg=[0.8] * 5, ditto=[0.6, 0.7, 0.6, 0.7, 0.6]).find("ditto")
    assert found is not None
    figures = {name: estimate.by_seed[1] for name, estimate in found.figures.items()}
    clients = 0.7 + np.array([-0.02, -0.01, 0.01, 0.02])
    assert figures["mean"] == pytest.approx(0.7)
    assert figures["worst10"] == pytest.approx(0.68)
    assert figures["variance"] == pytest.approx(clients.var(ddof=1))
    assert (figures["gain_local"], figures["gainers_local"]) == (pytest.approx(0.2), 1.0)
    assert (figures["gain_fedavg"], figures["gainers_fedavg"]) == (pytest.approx(-0.1), 0.0)
    assert (figures["gradients"], figures["bytes"]) == (800, 2)
    assert math.isnan(figures["rounds_to_95"])  # 0.7 is below 95 % of 0.8
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(0.64 - 0.8)


def test_a_method_of_more_gradients_is_also_read_at_those_of_fedavg() -> None:
    setup = FULL["iid"]
    costly = record(setup, "ditto", [0.8] * 5)
    costly = replace(costly, seeds={s: one._replace(gradients=[0.0, 800.0, 1600.0]) for s, one in costly.seeds.items()})
    known = {("iid", "ditto"): costly, **{("iid", m): record(setup, m, [0.5] * 5) for m in REFERENCE_METHODS[:2]}}
    found = judge_setup(setup, known).find("ditto")
    assert found is not None
    assert found.figures["mean_at_fedavg_work"].mean == pytest.approx(0.72)
    assert found.figures["mean"].mean == pytest.approx(0.8)


@given(st.lists(st.floats(0.1, 0.9), min_size=5, max_size=5), st.lists(st.floats(0.1, 0.9), min_size=5, max_size=5))
def test_one_gain_is_clear_as_the_paired_t_test_says(a: list[float], b: list[float]) -> None:
    found = judged(local=a, fedavg=b)
    other = next(s for s in found.standings if s.method != found.reference)
    differences = np.subtract(a, b)
    assert other.gain is not None
    if np.ptp(differences) > 1e-6:
        assert other.gain.significant == (stats.ttest_1samp(differences, 0).pvalue <= 0.05)
    assert other.gain.mean <= 1e-12


def test_fewer_seeds_than_five_decide_nothing() -> None:
    found = judged(local=[0.1, 0.1001], fedavg=[0.9, 0.9001])
    assert {s.verdict for s in found.standings} == {"not tested"}
    assert found.needed == 0


def test_a_second_look_confirms_what_goes_the_same_way_and_nothing_else() -> None:
    setup = FULL["iid"]
    marks = {("iid", m): record(setup, m, [0.5, 0.51, 0.52, 0.5, 0.51]) for m in REFERENCE_METHODS[:2]}
    ditto = record(setup, "ditto", [0.8, 0.82, 0.81, 0.8, 0.83])
    for again, confirmed in (({}, None), (ditto.seeds, True)):
        both = {k: replace(r, again=r.seeds) for k, r in marks.items()}
        found = judge_setup(setup, {**both, ("iid", "ditto"): replace(ditto, again=again)}).find("ditto")
        assert found is not None
        assert (found.better, found.confirmed) == (True, confirmed)
    other = record(setup, "ditto", [0.5, 0.49, 0.52, 0.53, 0.48]).seeds
    both = {k: replace(r, again=r.seeds) for k, r in marks.items()}
    found = judge_setup(setup, {**both, ("iid", "ditto"): replace(ditto, again=other)}).find("ditto")
    assert found is not None
    assert found.confirmed is False


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 1))
def test_groups_cover_every_place_and_none_is_within_another(values: list[float], width: float) -> None:
    order = sorted(values, reverse=True)
    found = indistinct_groups(len(order), lambda i, k: order[i] - order[k] > width)
    assert {k for a, b in found for k in range(a, b + 1)} == set(range(len(order)))
    assert all(order[a] - order[b] <= width for a, b in found)
    assert all(b == len(order) - 1 or order[a] - order[b + 1] > width for a, b in found)
    assert all(b < d and a < c for (a, b), (c, d) in pairwise(found))


def test_over_setups_friedman_and_nemenyi_by_their_formulas() -> None:
    pytest.importorskip("scikit_posthocs")
    rng, names = np.random.default_rng(0), list(FULL)[:8]
    table = rng.normal([0.7, 0.6, 0.6, 0.5], 0.02, (8, 4))
    methods = ["fedavg", "local", "ditto", "apfl"]
    records = {
        (n, m): record(FULL[n], m, [table[i, k]] * 5) for i, n in enumerate(names) for k, m in enumerate(methods)
    }
    found = compare_overall([judge_setup(setup, records) for setup in FULL.values()])
    assert found is not None
    assert set(found.setups) == set(names)
    ranks = stats.rankdata(-table, axis=1).mean(0)
    assert dict(zip(found.methods, found.ranks, strict=True)) == pytest.approx(dict(zip(methods, ranks, strict=True)))
    assert found.p == pytest.approx(stats.friedmanchisquare(*table.T).pvalue)
    width = stats.studentized_range.ppf(0.95, 4, np.inf) / math.sqrt(2) * math.sqrt(4 * 5 / (6 * 8))
    assert found.groups == indistinct_groups(4, lambda i, k: found.ranks[k] - found.ranks[i] > width)


def test_gaps_leave_the_largest_block_and_little_leaves_none() -> None:
    records = {(n, m): record(FULL[n], m, [0.5] * 5) for n in list(FULL)[:5] for m in ("fedavg", "local")}
    assert compare_overall([judge_setup(setup, records) for setup in FULL.values()]) is None


# --- the page


def test_a_map_without_a_record_says_so(tmp_path: Path) -> None:
    files = dict(map_pages(FULL, {}))
    assert f"in {len(FULL)} federations (0 of" in files[""]
    assert files[""].count("\n\nNot run.\n") == len(FULL)
    assert "too few results from tuned federations" in files[""]
    assert "To run the missing methods (all methods), use `fedloom map --setup iid`." in files["iid.md"]
    assert pq.read_table(_file(tmp_path, files["map.parquet"])).num_rows == 0
    assert files["map.svg"].count("·".encode()) >= 15 * len(REGISTRY)


def _file(folder: Path, content: bytes) -> Path:
    path = folder / "map.parquet"
    path.write_bytes(content)
    return path


def test_sentences_name_what_is_significant_and_nothing_else() -> None:
    found = judged(
        local=[0.5, 0.51, 0.52, 0.5, 0.51], fedavg=[0.7, 0.72, 0.71, 0.7, 0.73], ditto=[0.8, 0.83, 0.81, 0.8, 0.82],
        apfl=[0.6, 0.8, 0.7, 0.6, 0.8],
    )  # fmt: skip
    first, second, third, fourth = setup_sentences(found)
    assert "is 71.2 ± 1.6 % with FedAvg" in first
    assert "FedAvg helps 100 % of the clients" in first
    assert first.endswith("points (better).")
    assert second.startswith(
        "Of the 2 other methods, 1 is better than the baseline, and none is worse. The verdict is inconclusive for 1."
    )
    assert "The better method is ditto (+10.0" in second
    assert third.startswith("The method with the best mean is ditto")
    assert (
        f"With this spread, {found.needed} seeds are needed to detect a difference of 3 points, and 5 were run"
        in fourth
    )


def test_nothing_is_recommended_where_the_seeds_cannot_decide() -> None:
    """The cheapest of methods that are not told apart is no advice, and neither is a mean with a wide interval."""
    wild = {"local": [0.9, 0.1, 0.6, 0.4, 0.7], "fedavg": [0.2, 0.8, 0.7, 0.5, 0.4],
            "pfedme": [0.83, 0.84, 0.82, 0.83, 0.83], "fedslr": [0.8, 0.2, 0.5, 0.9, 0.6]}  # fmt: skip
    found = judged(**wild)
    assert (recommended_method(found), found.decides) == (None, False)
    (row,) = [line for line in advice_lines([found], {}) if "iid" in line]
    needed = f"{found.needed} seeds are needed to detect a difference of 3 points"
    assert row == f"| [IID clients](map/iid.md) | inconclusive | {needed} | - | - | - |"
    other = judged(**{m: [2 * v for v in values] for m, values in wild.items()})
    assert other.needed > found.needed  # of the spread
    moved = judged(**{m: [v + (m == "pfedme") for v in values] for m, values in wild.items()})
    assert moved.needed == found.needed  # and of no observed gain
    rng = np.random.default_rng(0)
    centres = {"local": 0.6, "fedavg": 0.7, "ditto": 0.7, "apfl": 0.7, "cfl": 0.69}
    steady = {m: (centre + rng.normal(0, 0.002, 5)).tolist() for m, centre in centres.items()}
    powered = judged(**steady)
    assert powered.decides
    assert not [s for s in powered.standings if s.better]
    chosen = recommended_method(powered)
    assert chosen is not None
    assert chosen.method == powered.reference == "fedavg"


def test_the_planned_seeds_show_the_gain_with_its_probability() -> None:
    """By simulation with the moderated test's own error at the first step of Holm's correction."""
    rng, found = np.random.default_rng(0), judged(
        local=[0.5, 0.53, 0.49, 0.52, 0.5], fedavg=[0.6, 0.66, 0.61, 0.62, 0.59], ditto=[0.6, 0.61, 0.66, 0.58, 0.62],
        apfl=[0.61, 0.65, 0.6, 0.59, 0.63], cfl=[0.6, 0.62, 0.61, 0.66, 0.57],
    )  # fmt: skip
    n, s2, members = found.needed, found.spread**2, len(found.standings) - 1
    prior = fit_common_prior([np.array([s.figures["mean"].by_seed[k] for k in range(5)]) - np.array(
        [found.standings[0].figures["mean"].by_seed[k] for k in range(5)]) for s in found.standings[1:]])  # fmt: skip
    assert prior is not None
    degrees = min(n - 1 + prior.degrees, max(prior.max_freedom, n - 1))
    error = np.sqrt(s2 / n * rng.chisquare(degrees, 40_000) / degrees)
    shown = np.abs(rng.normal(DETECTABLE_GAIN, math.sqrt(s2 / n), 40_000)) / error
    power = (shown >= stats.t.isf(MODERATED_LEVEL / members / 2, degrees)).mean()
    assert DETECTION_PROBABILITY - 0.01 <= power <= DETECTION_PROBABILITY + 0.15  # whole seeds


def test_the_seeds_of_a_plan_are_judged_together_as_soon_as_every_method_has_run_them() -> None:
    """In one look, that replaces a significant verdict too; until then, their results change nothing."""
    setup = replace(FULL["iid"], plan=(7, 8))
    rng = np.random.default_rng(1)
    means = {m: rng.normal(centre, 0.01, 8) for m, centre in (
        ("local", 0.5), ("fedavg", 0.7), ("ditto", 0.75), ("apfl", 0.7), ("cfl", 0.69), ("flame", 0.68))}  # fmt: skip
    means["ditto"][5:] -= 0.3
    names = list(map(str, setup.stages[-1]))

    def with_seeds(counts: dict[str, int]) -> SetupVerdict:
        cells = {}
        for m, values in means.items():
            whole = record(setup, m, values.tolist())
            kept = dict(zip(names, whole.seeds.values(), strict=True))
            cells[setup.name, m] = replace(whole, seeds={s: kept[s] for s in names[: counts.get(m, 8)]})
        return judge_setup(setup, cells)

    first = with_seeds(dict.fromkeys(means, 5))
    assert {s.method for s in first.standings if s.better} == {"ditto"}
    assert "8 seeds are planned, but some methods have not run all of them yet" in setup_sentences(first)[-1]
    for partial in ({"cfl": 5}, dict.fromkeys([*means][1:], 5), {"ditto": 6}):
        found = with_seeds(partial)
        assert (found.standings, found.needed, found.seeds) == (first.standings, first.needed, setup.seeds)
    for count in (7, 8):
        found = with_seeds(dict.fromkeys(means, count) | {"local": 8})
        assert found.seeds == setup.stages[-1][:count]
        assert not [s for s in found.standings if s.better]
        assert {*map(tuple, (s.figures["mean"].by_seed for s in found.standings))} == {setup.stages[-1][:count]}
    assert "planned" not in setup_sentences(found)[-1]


def test_seeds_planned_from_the_spread_keep_the_error_of_a_family() -> None:
    """Without a correction for the second look, because no observed gain decides on it."""
    rng, families, false, sizes = np.random.default_rng(2), 300, 0, set[int]()
    for _ in range(families):
        sigma = 0.011 / np.sqrt(rng.chisquare(4, 40) / 4)
        values = rng.normal(0, sigma[:, None], (40, 20)) + rng.normal(0, 0.005, 20)  # gains share the baseline
        prior = fit_common_prior([*values[:, :5]])
        assert prior is not None
        count = min(20, max(5, required_seeds(DETECTABLE_GAIN, prior, MODERATED_LEVEL / 40, DETECTION_PROBABILITY)))
        tests = run_family_tests(
            {k: dict(enumerate(row[:count].tolist())) for k, row in enumerate(values)}, moderate=True
        )
        false, sizes = false + any(test.significant for test in tests.values()), sizes | {count}
    assert false <= 0.05 * families
    assert len(sizes) > 3


class Recomputed:
    """What the page states of a setup, from the rows of the table alone, by the script that shares no code."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        table = pd.DataFrame([(r["method"], r["seed"], r["mean"]) for r in rows if r["mean"] is not None],
                             columns=["method", "seed", "mean"])  # fmt: skip
        self.judged = recomputed.judge_setup(table)
        self.means, self.reference = self.judged.means, self.judged.reference
        order = sorted(self.means, key=lambda m: -self.means[m].mean())
        self.top = next(m for m in order if m != "centralized")
        others = [m for m in order if m not in ("local", "fedavg", "centralized")]
        self.others = len(others)
        self.better, self.worse = (
            [m for m in others if self.judged.verdicts[m] == word] for word in ("better", "worse")
        )
        self.decides = self.judged.needed <= len(self.means["fedavg"])
        self.mark = "fedavg" if self.reference == "local" else "local"
        apart = self.judged.verdicts[self.mark] == "worse"
        alone = self.reference if self.decides and apart else "inconclusive"
        self.advised = self.better[0] if self.better else alone


def recorded_rows(protocol: str = "rounds") -> list[dict[str, Any]]:
    """Rows of a protocol, or of both (""), in the table of the repository."""
    rows: list[dict[str, Any]] = pc.read_csv(ROOT / "studies" / "pages" / "map" / "map.csv").to_pylist()
    return [row for row in rows if protocol in ("", row["protocol"])]


def checked(text: str, rows: list[dict[str, Any]]) -> None:
    """Compare the sentences on a setup with what its rows give."""
    fresh = Recomputed(rows)
    words = re.search(
        r"Of the (\d+) other methods, (\d+|none) (?:is|are) better .*?, and (\d+|none) (?:is|are) worse. "
        r"The verdict is inconclusive for (\d+|no method)\.",
        text,
    )
    assert words is not None
    counts = [int(word) if word.isdecimal() else 0 for word in words.groups()]
    rest = fresh.others - len(fresh.better) - len(fresh.worse)
    assert counts == [fresh.others, len(fresh.better), len(fresh.worse), rest]
    for m in fresh.better[:5]:
        gain, half = fresh.judged.gains[m]
        assert f"{m} (+{100 * gain:.1f} ± {100 * half:.1f}" in text
    assert f"The method with the best mean is {fresh.top} ({100 * fresh.means[fresh.top].mean():.1f}" in text
    power = re.search(
        r"gains have a standard deviation of ([\d.]+) points across seeds. With this spread, "
        r"(\*?)(\d+) seeds are needed to detect a difference of 3 points",
        text,
    )
    assert power is not None
    assert float(power[1]) == pytest.approx(100 * fresh.judged.spread, abs=0.051)
    assert (int(power[3]), power[2] == "") == (fresh.judged.needed, fresh.decides)
    word = fresh.judged.verdicts[fresh.mark]
    if fresh.mark == "local":  # stated of FedAvg
        word = {"worse": "better", "better": "worse"}.get(word, word)
    change = re.search(rf"difference from local training is \+?(-?[\d.]+) ± ([\d.]+) points \({word}\)\.", text)
    assert change is not None
    difference = fresh.means["fedavg"] - fresh.means["local"]
    assert float(change[1]) == pytest.approx(100 * difference.mean(), abs=0.051)
    assert float(change[2]) == pytest.approx(100 * fresh.judged.gains[fresh.mark][1], abs=0.051)


def best_alone(setup: str, local: Any) -> tuple[Any, str]:
    """The best model of a client alone by seed, and its name as the first table has it."""
    file = ROOT / "studies" / "results" / "map-full-references.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    models = {"": local}
    for line in lines:
        if line["setup"] == setup and line["method"].endswith("per client"):
            clients = [np.array(line["seeds"][seed][0], float) for seed in sorted(line["seeds"], key=int)]
            models[f" ({line['method']})"] = np.array([np.nanmean(values) for values in clients])
    words = max(models, key=lambda name: models[name].mean())
    return models[words], words


def test_the_first_table_of_the_repository_follows_from_the_rows_of_the_table_of_runs() -> None:
    rows = recorded_rows()
    text = (ROOT / "docs" / "map.md").read_text()
    shown = re.findall(
        r"^\| \[[^]]*\]\([^)#]+/(\S+)\.md\) \| (\S+) \| (.*?) \| (.*?) \| (.*?) \| (.*) \|$", text, re.MULTILINE
    )
    assert {name for name, *_ in shown} == {row["setup"] for row in rows}
    assert len(shown) == len({name for name, *_ in shown})
    largest = []
    for name, method, gain, *means, cost in shown:
        own = [row for row in rows if row["setup"] == name]
        fresh = Recomputed(own)
        assert method == fresh.advised
        if method == "inconclusive":
            assert gain.startswith(f"{fresh.judged.needed} seeds are needed to detect a difference of 3 points")
            assert (f". {fresh.reference} is better than " in gain) == (fresh.judged.verdicts[fresh.mark] == "worse")
            assert [*means, cost] == ["-"] * 3
            largest.append(-math.inf)
            continue
        if method != fresh.reference:
            mean, half = map(float, gain.split(" ± "))
            assert [mean, half] == pytest.approx([100 * x for x in fresh.judged.gains[method]], abs=0.051)
        assert (gain == "no method is better") == (method == fresh.reference)
        alone, words = best_alone(name, fresh.means["local"])
        found = [float((fresh.means[method] - figure).mean()) for figure in (fresh.means["fedavg"], alone)]
        largest.append(max(found))
        for text_, difference, mark in zip(
            [means[0], means[1].removesuffix(words)], found, ("fedavg", "local"), strict=True
        ):
            assert text_ == "-" if method == mark else float(text_) == pytest.approx(100 * difference, abs=0.051)
        spent = {m: np.mean([r["gradients"] for r in own if r["method"] == m]) for m in (method, "fedavg")}
        assert float(cost.split()[0]) == pytest.approx(spent[method] / spent["fedavg"], rel=0.051)
    assert largest == sorted(largest, reverse=True)
    none = re.search(r"In (\d+) of (\d+) federations, no method is better", text)
    assert none is not None
    better = [Recomputed([row for row in rows if row["setup"] == name]).better for name, *_ in shown]
    assert [int(none[1]), int(none[2])] == [sum(not found for found in better), len(better)]


def test_the_page_of_the_repository_says_what_its_table_gives() -> None:
    rows = recorded_rows()
    page = (ROOT / "docs" / "map.md").read_text()
    paragraphs = re.findall(r"^### \[.*?\]\(\S+/(\S+)\.md\)\n\n.*\n\n(.*)$", page, re.MULTILINE)
    run = {row["setup"] for row in rows}
    assert [name for name, _ in paragraphs if name in run] == [name for name in FULL if name in run]
    assert run <= FULL.keys()
    for name, text in paragraphs:
        if name in run:
            checked(text, [row for row in rows if row["setup"] == name])
        else:
            assert text.endswith("Not run.")
    blind = re.search(r"In (\d+) of (\d+) federations, there are too few seeds to detect a gain of 3 points", page)
    assert blind is not None
    fresh = [Recomputed([row for row in rows if row["setup"] == name]) for name in run]
    decides = [one.decides for one in fresh]
    assert [int(blind[1]), int(blind[2])] == [decides.count(False), len(decides)]
    alone = [one.decides for one in fresh if not one.better]
    assert f"Of the {len(alone)} federations without a better method, {sum(alone)} have enough seeds." in page
    stale = {(row["setup"], row["method"], row["protocol"]) for row in recorded_rows("") if row["stale"]}
    old = [sum(key[2] == protocol for key in stale) for protocol in ("rounds", "gradients")]
    assert f"{old[0]} for equal rounds and {old[1]} for equal gradients" in page
    ranked_ = re.search(r"(\d+) methods have results in all (\d+) federations with tuning", page)
    assert ranked_ is not None
    tuned = [
        {r["method"] for r in rows if r["setup"] == name and r["mean"] is not None} for name in run if FULL[name].ranks
    ]
    assert [int(ranked_[1]), int(ranked_[2])] == [len({*COUNTED_METHODS}.intersection(*tuned)), len(tuned)]


@pytest.mark.parametrize("draw", range(6))
def test_sentences_are_those_of_scipy_and_statsmodels_on_any_records(draw: int) -> None:
    rng, setup = np.random.default_rng(draw), FULL["labels"]
    names = ["local", "fedavg", "centralized", *[m for m in REGISTRY if m not in REFERENCE_METHODS][:12]]
    centres, common = rng.uniform(0.55, 0.85, len(names)), rng.normal(0, 0.03, 5)
    cells = {
        (setup.name, m): record(setup, m, (centre + common + rng.normal(0, 0.02, 5)).tolist())
        for m, centre in zip(names, centres, strict=True)
    }
    found = judge_setup(setup, cells)
    checked(" ".join(setup_sentences(found)), verdict_table([found]).to_pylist())
    for s in found.standings:
        assert s.gain is None or s.gain.significant == (abs(s.gain.mean) > s.gain.half)


def test_an_untuned_setup_counts_in_no_rank() -> None:
    names = list(FULL)
    assert not FULL["femnist"].ranks
    cells = {(n, m): record(FULL[n], m, [0.5 + k / 100] * 5) for n in names for k, m in enumerate(REGISTRY)}
    setups_, _, _, ranks = largest_complete_block([judge_setup(setup, cells) for setup in FULL.values()])
    assert set(setups_) == set(names) - {"femnist"}
    reversed_ = {k: replace(cells[k], seeds=record(FULL["femnist"], k[1], [0.9 - i / 100] * 5).seeds)
                 for i, k in enumerate([k for k in cells if k[0] == "femnist"])}  # fmt: skip
    assert largest_complete_block([judge_setup(setup, cells | reversed_) for setup in FULL.values()])[3] == ranks


def test_the_page_names_model_rounds_and_trials() -> None:
    text = dict(map_pages({"femnist": FULL["femnist"]}, {}))[""]
    assert "cnn (channels [4, 8], hidden [64]). All methods train for 40 rounds with default settings." in text
    page = dict(map_pages({"iid": FULL["iid"]}, {}))["iid.md"]
    assert "mlp (hidden [64]). All methods train for 40 rounds with 8 tuning trials per method." in page


def test_pooled_data_are_a_mark_and_no_advice() -> None:
    means: dict[str, list[float]] = {"local": [0.5, 0.51, 0.52, 0.5, 0.51], "fedavg": [0.7, 0.72, 0.71, 0.7, 0.73]}
    without, with_mark = (setup_sentences(judged(**means, **more))[2] for more in ({}, {"centralized": [0.9] * 5}))
    assert without.startswith("The method with the best mean is fedavg")
    assert with_mark.startswith(without)
    assert with_mark.endswith("A single model trained on the pooled data scores 90.0 ± 0.0 %.")


def test_the_table_has_a_row_per_run_and_the_reason_of_a_cell_without_one(tmp_path: Path) -> None:
    setup, records = FULL["iid"], {("iid", m): record(FULL["iid"], m, [0.5] * 5) for m in REFERENCE_METHODS[:2]}
    records["iid", "fedbn"] = record(setup, "fedbn", [], status=NOT_APPLICABLE_STATUS, reason="no norms", seeds={})
    files = dict(map_pages({"iid": setup}, records))
    table = pq.read_table(_file(tmp_path, files["map.parquet"]))
    assert table.num_rows == 5 + 5 + 1
    (tmp_path / "map.csv").write_bytes(files["map.csv"])
    assert pc.read_csv(tmp_path / "map.csv")["mean"].to_pylist() == table["mean"].to_pylist()
    assert {"commit", "versions", "gain_local", "gainers_fedavg", "worst10"} <= set(table.column_names)
    assert "- `fedbn` is not applicable: no norms" in files["iid.md"]
    assert verdict_table([judge_setup(setup, records)]).equals(table)


# --- equal gradients


class RecomputedChange:
    """Changes from equal rounds to equal gradients, from the rows of the table alone, by SciPy and statsmodels."""

    def __init__(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        self.lower, self.higher = list[str](), list[str]()
        both = {row["seed"] for row in after}  # the first seeds: those of a plan run at equal rounds only
        before = [row for row in before if row["seed"] in both]
        spent = {(row["method"], row["seed"]): row["gradients"] for row in before}
        dear = {m for (m, k), own in spent.items() if own and not 0.99 <= own / (spent["fedavg", k] or own) <= 1.01}
        anew = {row["method"] for row in after if row["mean"] is not None and row["method"] in dear}
        means = [
            {m: {r["seed"]: r["mean"] for r in rows if r["method"] == m and r["mean"] is not None} for m in anew}
            for rows in (before, after)
        ]
        self.anew = sorted(m for m in anew if means[0][m])
        pairs = {m: ([means[1][m][k] for k in sorted(means[1][m])], [means[0][m][k] for k in sorted(means[0][m])])
                 for m in self.anew}  # fmt: skip
        if pairs:
            p = [1.0 if pairs[m][0] == pairs[m][1] else stats.ttest_rel(*pairs[m]).pvalue for m in self.anew]
            rejections = multipletests(p, alpha=0.05, method="holm")[0]
            for m, apart in zip(self.anew, rejections, strict=True):
                if apart:
                    (self.lower if np.mean(pairs[m][0]) < np.mean(pairs[m][1]) else self.higher).append(m)


def checked_change(text: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """Compare the sentence on equal gradients with what the rows give."""
    fresh = RecomputedChange(before, after)
    words = re.search(
        r"(\d+) methods compute more or fewer .*?, (\d+|no method) (?:is|are) .*?, and (\d+|no method) (?:is|are)", text
    )
    if not fresh.anew:
        assert words is None
        return
    assert words is not None
    counts = [0 if word == "no method" else int(word) for word in words.groups()]
    assert counts == [len(fresh.anew), len(fresh.lower), len(fresh.higher)]
    for word, names in (("Lower", fresh.lower), ("Higher", fresh.higher)):
        named = re.search(rf"{word}: (.*?)\.(?:\s|$)", text)
        assert (named is not None) == bool(names)
        assert named is None or {n.split()[0] for n in named[1].split(" and ")[0].split(", ")} <= {*names}


def test_sections_of_equal_gradients_in_the_repository_state_what_their_rows_give() -> None:
    rows, first = recorded_rows("gradients"), recorded_rows()
    page = (ROOT / "docs" / "map.md").read_text()
    lines = dict(re.findall(r"^\| \[.*?\]\(\S+/(\S+)\.md#at-equal-gradients\) \| (.*) \|$", page, re.MULTILINE))
    for name in {row["setup"] for row in rows}:
        before, after = ([row for row in every if row["setup"] == name] for every in (first, rows))
        text = (ROOT / "studies" / "pages" / "map" / f"{name}.md").read_text().split("## At equal gradients")[1]
        checked_change(text, before, after)
        if name not in lines:
            assert not {*REFERENCE_METHODS[:2]} <= {row["method"] for row in after if row["mean"] is not None}
            continue
        checked(text, after)
        fresh, change = Recomputed(after), RecomputedChange(before, after)
        cells, best, better, lower, higher = lines[name].split(" | ")
        assert int(cells.split()[0]) == len({row["method"] for row in after})
        assert best.startswith(f"{fresh.top} {100 * fresh.means[fresh.top].mean():.1f} ")
        for stated, names in ((better, fresh.better), (lower, change.lower), (higher, change.higher)):
            named = [] if stated == "none" else [item.split()[0] for item in stated.split(" and ")[0].split(", ")]
            assert len(named) == min(5, len(names))
            assert {*named} <= {*names}


def test_no_run_of_the_repository_at_equal_gradients_is_far_from_those_of_fedavg() -> None:
    budgets = {(r["setup"], r["seed"]): r["gradients"] for r in recorded_rows() if r["method"] == "fedavg"}
    records = read_records(ROOT / "studies" / "results" / "map-full.jsonl", "gradients")
    dearer = set()
    for (setup, method), cell in records.items():
        for seed, series in cell.seeds.items():  # a first round that takes more than all is the least that there is
            if series.gradients[-1] > 1.1 * budgets[setup, int(seed)]:
                assert series.rounds[-1] == 1
                dearer.add(method)
    page = (ROOT / "docs" / "map.md").read_text()
    (stated,) = re.findall(r"A run lasts at least one round, so some methods exceed the budget: (.*?)\. ", page)
    assert {*re.findall(r"(\S+) \(by a factor of [\d.]+\)", stated)} == dearer


def test_methods_at_equal_gradients_are_those_of_the_rule() -> None:
    methods = list_methods("gradients")
    assert methods[:3] == ("local", "fedavg", "fedavg-ft")
    assert len({*methods}) == len(methods) == 3 + 15
    assert {*methods} <= REGISTRY.keys()
    assert {"fiaelt", "flame", "fedslr", "equitable-fl", "fedacs"} <= {*methods}
    assert {*list_methods("rounds")} == REGISTRY.keys()


@pytest.mark.parametrize("draw", range(4))
def test_changes_at_equal_gradients_are_those_of_scipy_and_statsmodels_on_any_records(draw: int) -> None:
    rng, setup = np.random.default_rng(draw), FULL["labels"]
    first, second = dict[tuple[str, str], CellRecord](), dict[tuple[str, str], CellRecord]()
    for m in list_methods("gradients"):
        means = (rng.uniform(0.55, 0.85) + rng.normal(0, 0.02, 5)).tolist()
        first["labels", m] = record(setup, m, means)
        if m not in ("fedavg", "local", "ifca"):
            dear = {k: one._replace(gradients=[0.0, 800.0, 1600.0]) for k, one in first["labels", m].seeds.items()}
            first["labels", m] = replace(first["labels", m], seeds=dear)
        other = (np.array(means) + rng.choice([0.0, -0.1, 0.05]) + rng.normal(0, 0.01, 5)).tolist()
        again = record(setup, m, other, protocol="gradients")
        alike = record(setup, m, [], protocol="gradients", status=REUSED_STATUS, reason="the same runs", seeds={})
        second["labels", m] = alike if m in ("fedavg", "local") else again
    both = compare_protocols(judge_setup(setup, first), first, second)
    before, after = verdict_table([both.rounds]).to_pylist(), verdict_table([both.gradients]).to_pylist()
    checked_change(changes_in_words(both), before, after)
    checked(" ".join(setup_sentences(both.gradients)), after)
    assert {r["mean"] for r in after if r["method"] == "fedavg"} == {
        r["mean"] for r in before if r["method"] == "fedavg"
    }
    assert {*list_methods("gradients")} - both.changes.keys() == {"fedavg", "local", "ifca"}
    assert both.repeated == ["ifca"]  # whose work is FedAvg's: what differs is no change of the work


def test_what_is_reused_follows_the_record_at_equal_rounds_and_is_left_out_without_it() -> None:
    setup = FULL["iid"]
    reused = {
        ("iid", "fedavg"): record(
            setup, "fedavg", [], protocol="gradients", status=REUSED_STATUS, seeds={}, minutes=0.1
        )
    }
    first = {("iid", "fedavg"): record(setup, "fedavg", [0.7] * 5)}
    whole = fill_reused(reused, first)["iid", "fedavg"]
    assert (whole.status, whole.protocol, whole.minutes, whole.seeds) == (
        DONE_STATUS,
        "gradients",
        0.1,
        first["iid", "fedavg"].seeds,
    )
    assert fill_reused(reused, {}) == {}
    assert (
        "To run the missing methods (all methods), use `fedloom map --protocol gradients --setup iid`."
        in dict(map_pages({"iid": setup}, first))["iid.md"]
    )


def test_runs_of_equal_gradients_have_the_rounds_of_their_budget_and_equal_runs_are_reused(here: Path) -> None:
    words = ("--setup", "iid", "--method", "perfedavg")
    called(*words)
    called(*words, "--protocol", "gradients")
    first, second = read_records(RECORDS), read_records(RECORDS, "gradients")
    assert {m: r.status for (_, m), r in second.items()} == {
        "local": REUSED_STATUS,
        "fedavg": REUSED_STATUS,
        "perfedavg": DONE_STATUS,
    }
    assert len(second["iid", "perfedavg"].trials) == 2
    rounds = [cells["iid", "perfedavg"].seeds["0"].rounds[-1] for cells in (first, second)]
    assert rounds == [2, 1]  # a round takes four times the gradients of FedAvg's
    before = RECORDS.read_bytes()
    called(*words, "--protocol", "gradients")
    called(*words)
    assert RECORDS.read_bytes() == before
    assert "did you mean 'gradients'" in called("--protocol", "gradient", code=2)


def test_the_rounds_that_a_budget_buys_bring_the_gradients_nearest_to_those_of_fedavg() -> None:
    setup = SMOKE["labels"]
    setup = replace(setup, document={**setup.document, "rounds": 6})
    budget = GradientBudget(setup, None)
    cell = Cell(setup, "fedavg-ft", protocol="gradients")
    samples = {}
    for rounds in (budget.rounds(cell, {"epochs": 2}, 0), 3, 5):
        document = replace_params({**cell.document, "seeds": [0]}, 0, {"epochs": 2}, rounds=rounds)
        plan = parse(document)
        (run,) = [simulate(plan.methods[0].setting.with_(rounds=rounds), plan.partition(plan.source.read(None), 0))]
        samples[rounds] = float(run.state.records.last("", "", "samples_backward")[0])
    assert list(samples) == [4, 3, 5]  # two of six rounds pay for two epochs after the last one
    plain = parse({**setup.document, "method": [{"algorithm": "fedavg"}]})
    fed = plan.partition(plan.source.read(None), 0)
    whole = 6 * int(fed.sizes("train").sum())
    assert samples[4] == whole
    assert plain.common.rounds == 6
    assert budget.missed(samples[3], 0)
    assert not budget.missed(samples[4], 0)


# --- reference models


def test_the_recommendation_under_attack_names_the_method_and_the_rule_that_the_records_support() -> None:
    """Four rules, three attacks: every verdict of the table, and the sentences, by NumPy and SciPy alone."""
    cells, rng = list(rule_cells()), np.random.default_rng(3)
    kinds = {cell.setup.document.get("aggregator", {"kind": "mean"})["kind"] for _, cell in cells}
    assert kinds == {"mean", "median", "multi-krum", "centered-clipping"}
    assert len({str(cell.setup.document["attack"]) for _, cell in cells}) == 3
    for _, cell in cells:
        parse(cell.document, cell.where)
    means: dict[str, dict[str, Any]] = {}
    for k, (name, cell) in enumerate(cells):
        gain = -0.1 if cell.setup.name == "random labels" else 0.1 * (k % 3 - 1)
        gain *= name not in ("local", "fedavg")
        means.setdefault(cell.setup.name, {})[name] = 0.8 + gain + rng.normal(0, 0.01, 5)
    records = {
        (cell.setup.name, name): record(cell.setup, name, list(means[cell.setup.name][name])) for name, cell in cells
    }
    page, sentence = "\n".join(rules_section(records)), advise_rule(records)
    titles = [title.strip() for title in page.split("| method and rule |")[1].split("\n")[0].split("|")[:-1]]
    rows = {row[0]: row[1:] for row in (line[2:-2].split(" | ") for line in page.splitlines() if " ± " in line[:60])}
    assert [*rows] == [name for name, cell in cells if cell.setup.name == titles[0]]
    best: dict[str, tuple[str, float, int]] = {}
    for attack, column in zip(titles, zip(*rows.values(), strict=True), strict=True):
        of = means[attack]
        baseline = max(("local", "fedavg"), key=lambda name: of[name].mean())
        rivals = [name for name in of if name != baseline]
        tested = recomputed.moderated(np.array([of[name] - of[baseline] for name in rivals]))
        verdicts = np.where(tested.rejected, np.where(tested.mean > 0, "better", "worse"), "inconclusive")
        words = dict(zip(rivals, verdicts, strict=True)) | {baseline: "baseline"}
        for name, cell_text in zip(rows, column, strict=True):
            assert cell_text.endswith(f", {words[name]}")
            assert float(cell_text.split()[0]) == pytest.approx(100 * of[name].mean(), abs=0.051)
        won = [name for name in rivals if words[name] == "better" and name not in REFERENCE_METHODS]
        if won:
            top = max(won, key=lambda name: of[name].mean())
            best[attack] = top, 100 * float((of[top] - of[baseline]).mean()), len(won)
    assert best.keys() == {*titles} - {"random labels"}
    worst = {name: min(of[name].mean() for of in means.values()) for name in rows}
    strongest = max(worst.keys() - {"local", "fedavg"}, key=lambda name: worst[name])
    for text in (page, sentence):
        named = re.findall(
            r"`([^`]+)` under \*([a-z ]+)\* \(\+([\d.]+) ± [\d.]+ points(?:, the best of (\d+) \w+)?\)", text
        )
        assert {attack: name for name, attack, *_ in named} == {attack: name for attack, (name, *_) in best.items()}
        for _, attack, points, count in named:
            assert float(points) == pytest.approx(best[attack][1], abs=0.051)
            assert int(count or 1) == best[attack][2]
        assert "No method is better than the baseline under *random labels*, with any rule." in text
        assert f"`{strongest}` has the best worst case: {100 * worst[strongest]:.1f} %" in text
    some = {key: one for key, one in records.items() if key[0] == titles[0]}
    assert len(some) < len(records)
    assert "| method and rule | " + titles[0] + " |" in "\n".join(rules_section(some))
    few = dict(list(some.items())[:4])
    assert f"4 of {len(cells)} results so far. To run the others, use `fedloom map --rules`." in advise_rule(few)
    assert "| method and rule |" not in "\n".join(rules_section(few))


def test_wider_cells_differ_from_the_map_s_in_the_model_alone() -> None:
    heads = ("analytic-fl", "fed3r", "fedhip")
    assert wider_heads() == heads
    assert {name for name in wider_setups("full") if len(wider_setups("full")[name].methods) > 3} == {
        "iid", "dirichlet-01", "labels",
    }  # fmt: skip
    for name, setup in wider_setups("full").items():
        assert setup.methods[:3] == heads
        assert len(set(setup.methods)) == len(setup.methods) in (3, 11)
        own = replace(FULL[name], plan=())
        for method in setup.methods:
            cell, narrow = Cell(setup, method), Cell(own, method)
            assert cell.seeds == narrow.seeds == FULL[name].seeds
            assert cell.digest != narrow.digest
            assert cell.plan.methods[0].setting.model.hidden == (500,)
            changed = {**cell.search, "model": narrow.search["model"]}
            for document in (changed, narrow.search):
                document["method"] = [{k: v for k, v in document["method"][0].items() if k != "model"}]
            assert changed == narrow.search


def test_wider_models_are_compared_by_the_seeds_that_both_have_and_change_nothing_else() -> None:
    """Every verdict by NumPy and SciPy: the heads over the setup's baseline, and all methods at the same width."""
    setup, rng = replace(FULL["iid"], plan=(7,)), np.random.default_rng(4)
    wide = wider_setups("full")["iid"]
    own = {"local": 0.7, "fedavg": 0.9, "fedhip": 0.8, "fed3r": 0.8, "analytic-fl": 0.8, "flame": 0.85}
    larger = dict.fromkeys(wide.methods, 0.88) | {"local": 0.72, "fedavg": 0.92, "fedhip": 0.95, "fed3r": 0.85}
    means = {m: rng.normal(centre, 0.01, 5) for m, centre in own.items()}
    wider_means = {m: rng.normal(centre, 0.01, 5) for m, centre in larger.items()}
    records = {("iid", m): record(setup, m, values.tolist()) for m, values in means.items()}
    widened = {("iid", m): record(wide, m, v.tolist(), parameters=37_510) for m, v in wider_means.items()}
    j = judge_setup(setup, records)
    page = "\n".join(wider_section(j, wide, widened))
    assert "mlp (hidden [500]), 37\u202f510 parameters. The federation's regular model is mlp (hidden [64])." in page
    assert "results so far" not in page
    rows = {row[0]: row[1:] for row in (line[2:-2].split(" | ") for line in page.splitlines() if " ± " in line[:60])}
    rows = {name.split(" (")[0]: cells for name, cells in rows.items()}
    assert [*rows] == sorted(wider_means, key=lambda m: -wider_means[m].mean())
    gains = {m: wider_means[m] - means["fedavg"] for m in wider_heads()}
    p = multipletests([stats.ttest_1samp(gain, 0).pvalue for gain in gains.values()], method="holm")[0]
    words = {m: ("better" if g.mean() > 0 else "worse") if no else "inconclusive"
             for (m, g), no in zip(gains.items(), p, strict=True)}  # fmt: skip
    assert set(words.values()) >= {"better", "worse"}
    rivals = [m for m in wider_means if m != "fedavg"]
    tested = recomputed.moderated(np.array([wider_means[m] - wider_means["fedavg"] for m in rivals]))
    beside = dict(zip(rivals, np.where(tested.rejected, np.where(tested.mean > 0, "better", "worse"), "inconclusive"),
                      strict=True)) | {"fedavg": "baseline"}  # fmt: skip
    for m, (narrow, mean, gain, same) in rows.items():
        assert (narrow == "-") == (m not in means)
        assert float(mean.split()[0]) == pytest.approx(100 * wider_means[m].mean(), abs=0.051)
        assert same.split(", ")[-1] == beside[m]
        assert gain.split(", ")[-1] == words.get(m, "-")
    for m, word in words.items():
        assert re.search(rf"Gains over fedavg with the regular model, [^:]*: .*?{m} \S+ ± \S+ \({word}\)", page)
    assert re.search(r"best closed-form head \(fedhip, [^)]*\) has rank 1 among the means of 11 methods", page)
    alone = {key: one for key, one in widened.items() if key[1] in wider_heads()}
    few = "\n".join(wider_section(j, wide, alone))
    assert "3 of 11 results so far. To run the others, use `fedloom map --wider --setup iid`." in few
    assert "No method that trains the wider model was run in this federation." in few
    everything = dict(map_pages({"iid": setup}, records, wider={"iid": wide}, widened=widened))
    plain = dict(map_pages({"iid": setup}, records))
    assert everything["iid.md"].startswith(plain["iid.md"])
    assert everything["map.csv"] == plain["map.csv"]
    assert "they also run with a wider model (all 11 results)" in str(everything[""])
    assert "ider model" not in str(plain[""])


def test_references_are_fitted_on_training_parts_and_scored_on_test_parts_by_client() -> None:
    """Digits stand in for a table; scikit-learn alone gives the same accuracy."""
    small = {
        "data": {"source": "digits"},
        "partition": {"kind": "shards", "clients": 4, "labels_per_client": 2, "max_train_per_client": 30},
    }
    document = {**FULL["hospitals"].document, **small}
    setup = replace(FULL["hospitals"], name="small", document=document, seeds=(3,))
    fitted = {record.method: record for record in references.measure_references(setup, None)}
    assert list(fitted) == [name for name, *_ in references.reference_names()]
    plan = parse({**document, "method": [{"algorithm": "fedavg"}]})
    fed = plan.partition(plan.source.read(None), 3)
    x, y = fed.data.x.flatten(1).numpy() / 16, fed.data.y.numpy()
    parts = [(fed.indices("train", i).numpy(), fed.indices("test", i).numpy()) for i in range(4)]
    every = np.concatenate([train for train, _ in parts])
    for name, trained in (("per client", [t for t, _ in parts]), ("pooled", [every] * 4)):
        record = fitted[f"logistic regression, {name}"]
        models = [LogisticRegression(max_iter=2000).fit(x[t], y[t]) for t in trained]
        want = [m.score(x[test], y[test]) for m, (_, test) in zip(models, parts, strict=True)]
        assert record.metric == "accuracy"
        np.testing.assert_allclose(record.seeds["3"].clients, want, atol=0.05)  # its inputs are scaled another way


def test_the_page_of_a_table_has_references_and_gains_over_the_best_local_model() -> None:
    setup = FULL["hospitals"]
    means = {"local": [0.5, 0.51, 0.52, 0.5, 0.51], "fedavg": [0.7, 0.72, 0.71, 0.7, 0.73]}
    records = {("hospitals", m): record(setup, m, mean) for m, mean in means.items()}
    assert (
        "The reference models have not been run yet." in dict(map_pages({"hospitals": setup}, records))["hospitals.md"]
    )
    names = [name for name, *_ in references.reference_names()]
    beside = {("hospitals", name): record(setup, name, [0.6 + k / 100] * 5) for k, name in enumerate(names)}
    page = dict(map_pages({"hospitals": setup}, records, beside))["hospitals.md"]
    assert "best model that a client can train alone is random forest, per client." in page
    assert "| fedavg | 71.2 ± 1.6 | +9.2 ± 1.6 |" in page
    assert "| local | 50.8 ± 1.0 | -11.2 ± 1.0 |" in page
    assert "Reference models" not in dict(map_pages({"iid": FULL["iid"]}, {}))["iid.md"]


# --- running


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    own(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def own(folder: Path, factor: str = "0.5", **changes: str) -> None:
    text = OWN.replace("FACTOR", factor)
    for before, after in changes.items():
        text = text.replace(before, after)
    (folder / "mine.py").write_text(text)
    sys.modules.pop("mine", None)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


def called(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["map", "--scale", "smoke", *words])
    assert result.exit_code == code, result.output
    return result.output


RECORDS = Path("runs/results/map-smoke.jsonl")
SOME = ("fedbn", "flame")


@pytest.mark.parametrize("methods", [SOME, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_map_at_smoke_scale(here: Path, methods: tuple[str, ...]) -> None:
    words = [word for method in methods for word in ("--method", method)]
    called(*words)
    found = read_records(RECORDS)
    wanted = {*methods, *REFERENCE_METHODS[:2]} if methods else REGISTRY.keys()
    assert found.keys() == {(setup, method) for setup in SMOKE for method in wanted}
    refused = {key for key, r in found.items() if r.status == NOT_APPLICABLE_STATUS}
    assert refused == {("iid", "fedbn"), ("labels", "fedbn")}
    for key in found.keys() - refused:
        r = found[key]
        assert (r.status, r.reason) == (DONE_STATUS, "")
        assert len(r.trials) == 2
        assert r.seeds.keys() == {"0"}
        assert len(r.seeds["0"].clients) == 20
        assert r.minutes > 0
    assert found["iid", "flame"].model == "hybrid"
    before = RECORDS.stat().st_mtime_ns
    called(*words)
    assert RECORDS.stat().st_mtime_ns == before


def recorded(place: str, run: Callable[..., object], *words: str) -> dict[tuple[str, str], Any]:
    """Records of three cells without their times."""
    run("--setup", "iid", "--method", "flame", "--out", f"runs/{place}", "--results", place, *words)
    return {key: replace(r, minutes=0.0, machine="") for key, r in read_records(Path(place, "map-smoke.jsonl")).items()}


def apart(*words: str) -> None:
    """The command in a process of its own: forks of one that has drawn cannot draw."""
    subprocess.run([sys.executable, "-m", "fedloom.lab.cli", "map", "--scale", "smoke", *words], check=True)


def test_cells_of_a_process_that_joins_have_the_records_of_one_alone(here: Path) -> None:
    alone = recorded("alone", called)
    assert alone.keys() == {("iid", m) for m in ("local", "fedavg", "flame")}
    assert recorded("joined", called, "--join") == alone
    assert not Path("runs/joined/smoke/.work").exists()


def test_an_executor_gives_the_records_of_one_process(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = recorded("alone", called)
    monkeypatch.setitem(EXECUTOR_KINDS, "processes", lambda count: ThreadPoolExecutor(int(count)))
    assert recorded("elsewhere", called, "--executor", "processes:2") == alone
    words = ("--executor", "processes:2", "--protocol", "gradients", "--setup", "iid", "--results")
    called(
        "--setup", "iid", "--method", "flame", "--out", "runs/equal", "--results", "alone", "--protocol", "gradients"
    )
    called("--method", "flame", "--out", "runs/equal-2", *words, "elsewhere")
    equal = [read_records(Path(place, "map-smoke.jsonl"), "gradients") for place in ("alone", "elsewhere")]
    bare = [{key: replace(r, minutes=0.0) for key, r in one.items()} for one in equal]
    assert bare[0] == bare[1]
    assert any(r.status == REUSED_STATUS for r in bare[0].values())


@pytest.mark.slow
def test_cells_side_by_side_have_the_records_of_cells_one_after_another(here: Path) -> None:
    """By two processes of one command, and by two commands that join."""
    alone = recorded("alone", called)
    assert recorded("beside", apart, "--workers", "2") == alone
    words = ["--setup", "iid", "--method", "flame", "--out", "runs/joined", "--results", "joined", "--join"]
    with subprocess.Popen([sys.executable, "-m", "fedloom.lab.cli", "map", "--scale", "smoke", *words]) as other:
        assert recorded("joined", apart, "--join") == alone
    assert other.returncode == 0


def test_a_method_of_a_user_gets_its_row_beside_the_recorded_ones(here: Path) -> None:
    Path("space.toml").write_text('"local.lr" = [0.05, 0.1]\n')
    output = called("--method", "mine:Half", "--space", "space.toml", "--setup", "iid")
    assert "of 3" in output
    found = read_records(RECORDS)
    assert found.keys() == {("iid", m) for m in ("local", "fedavg", "mine:Half")}
    assert {values["local.lr"] for values, _ in found["iid", "mine:Half"].trials} == {0.05, 0.1}
    before = RECORDS.read_bytes()
    own(here, **{"Half a step": "Another word"})
    called("--method", "mine:Half", "--space", "space.toml", "--setup", "iid")
    assert RECORDS.read_bytes() == before
    own(here, **{"down.x)), rows": "down.x) * 1), rows"})  # other code, the same figures: a seed confirms the record
    called("--method", "mine:Half", "--space", "space.toml", "--setup", "iid")
    confirmed = read_records(RECORDS)["iid", "mine:Half"]
    assert confirmed == replace(found["iid", "mine:Half"], source=confirmed.source)
    assert confirmed.source != found["iid", "mine:Half"].source
    before = RECORDS.read_bytes()
    own(here, "0.25")
    called("--page", "map.md")
    assert "stale (another version of the method)" in Path("map/iid.md").read_text()
    called("--method", "mine:Half", "--space", "space.toml", "--setup", "iid")
    (changed,) = set(RECORDS.read_bytes().splitlines()) - set(before.splitlines())
    assert json.loads(changed)["method"] == "mine:Half"
    called("--page", "map.md")
    assert "mine:Half" in Path("map/iid.md").read_text()
    assert "stale" not in Path("map/iid.md").read_text()


def test_a_method_that_diverges_or_refuses_has_its_cell_with_the_reason(here: Path) -> None:
    own(here, "1e30")
    called("--method", "mine:Half", "--method", "mine:Refuses", "--setup", "iid")
    found = read_records(RECORDS)
    assert found["iid", "mine:Half"].status == FAILED_STATUS
    assert "no trial completed" in found["iid", "mine:Half"].reason
    assert found["iid", "mine:Refuses"].status in (NOT_APPLICABLE_STATUS, FAILED_STATUS)
    assert "wants no such clients" in found["iid", "mine:Refuses"].reason
    called("--page", "map.md")
    assert "- `mine:Half` failed: no trial completed" in Path("map/iid.md").read_text()


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ("mu = [0.1]", "unknown setting 'mu'"),
        ('"local.lr" = { low = 1.0, high = 0.1 }', "low must be less than high, got 1.0 and 0.1"),
        ('"local.lr" = [-1.0]', "cannot be tried"),
        ("mu = ", "is not a TOML file"),
    ],
)
def test_a_space_that_cannot_be_is_refused_before_work(here: Path, space: str, said: str) -> None:
    Path("space.toml").write_text(space)
    assert said in called("--method", "mine:Half", "--space", "space.toml", code=2)
    assert not Path("runs").exists()


def test_what_is_asked_for_and_cannot_be(here: Path) -> None:
    assert "mine:Hal" in called("--method", "mine:Hal", code=2)
    assert "did you mean 'fedprox'" in called("--method", "fedprx", code=2)
    assert "did you mean 'iid'" in called("--setup", "iidd", code=2)
    assert "a time such as" in called("--budget", "soon", "--setup", "iid", code=2)
    assert "--space works only with exactly one --method" in called("--space", "space.toml", code=2)
    assert "--wider works only at equal rounds" in called("--wider", "--protocol", "gradients", code=2)
    assert "use one of --references, --rules, --wider" in called("--wider", "--rules", code=2)
    RECORDS.parent.mkdir(parents=True)
    for line in ("{}", "[]", "no"):
        RECORDS.write_text(line + "\n")
        assert "map-smoke.jsonl, line 1, is not a record" in called("--list", code=2)


def test_a_search_that_was_stopped_goes_on_to_the_same_record(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--method", "fedprox", "--setup", "iid")
    called(*words)
    whole = read_records(RECORDS)
    shutil.rmtree("runs")
    commands.reading_takes_a_second(monkeypatch)
    assert "stopped. The same command resumes from here" in called(*words, "--budget", "10s", code=130)
    for _ in range(40):
        result = CliRunner().invoke(app, ["map", "--scale", "smoke", *words, "--budget", "50s"])
        if result.exit_code == 0:
            break
    parts = read_records(RECORDS)
    assert parts.keys() == whole.keys()
    for key, record in parts.items():
        assert (record.chosen, record.trials, record.seeds) == (whole[key].chosen, whole[key].trials, whole[key].seeds)


def test_with_one_trial_every_method_runs_as_it_comes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {name: replace(setup, trials=1) for name, setup in read_setups("smoke").items()}
    monkeypatch.setattr("fedloom_studies.map.setups.read_setups", lambda _scale: one)
    called("--method", "fedprox", "--method", "fedbn", "--setup", "iid")
    found = read_records(RECORDS)
    record = found["iid", "fedprox"]
    assert (record.status, record.chosen, [*map(tuple, record.trials)]) == (DONE_STATUS, {}, [({}, None)])
    assert found["iid", "fedbn"].status == NOT_APPLICABLE_STATUS
    assert not list(Path("runs").rglob("tune-*"))
    plain = parse(Cell(one["iid"], "fedprox").document, "plain")
    (outcome,) = Plan(plain, Path("plain"), None).run(lambda _event: None, page=False)
    assert outcome.result is not None
    want = outcome.result.final("global").numpy()
    np.testing.assert_allclose(record.seeds["0"].clients, want, atol=1e-6)  # records have six digits


def test_wider_cells_have_a_file_of_their_own_and_a_row_in_the_listing(here: Path) -> None:
    assert re.search(r"labels +two classes per client, wider model +0 +11 ", called("--list", "--setup", "labels"))
    called("--wider", "--setup", "labels", "--method", "fed3r")
    assert not RECORDS.exists()
    found = read_records(RECORDS.with_name("map-smoke-wider.jsonl"))
    assert found.keys() == {("labels", m) for m in ("local", "fedavg", "fed3r")}
    assert {r.parameters for r in found.values()} == {64 * 500 + 500 + 500 * 10 + 10}
    called("--page", "map.md")
    assert "3 of 11 results so far" in Path("map/labels.md").read_text()
    assert "fed3r" not in Path("map/labels.md").read_text().partition("## Wider models")[0].partition("- Not run")[0]


def test_records_of_several_machines_merge_line_by_line(here: Path) -> None:
    lines = set[str]()
    for name, method in (("a", "fedavg"), ("b", "local")):
        called("--method", method, "--setup", "iid", "--results", name, "--out", f"runs-{name}")
        lines |= {x for x in Path(name, RECORDS.name).read_text().splitlines() if json.loads(x)["method"] == method}
    RECORDS.parent.mkdir(parents=True)
    RECORDS.write_text("\n".join(lines))
    found = read_records(RECORDS)
    assert found.keys() == {("iid", "fedavg"), ("iid", "local")}
    assert judge_setup(SMOKE["iid"], found).reference


def test_a_second_look_has_other_seeds_and_what_was_chosen(here: Path) -> None:
    called("--method", "fedavg", "--setup", "iid")
    before = read_records(RECORDS)
    called("--method", "fedavg", "--setup", "iid", "--again")
    after = read_records(RECORDS)
    for key, record in after.items():
        assert record.again.keys() == {"10"}
        assert replace(record, again={}, minutes=0) == replace(before[key], minutes=0)


def test_seeds_that_a_plan_adds_have_the_records_of_seeds_that_were_run_at_once(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--method", "fedprox", "--setup", "iid", "--results")
    known = {"iid": replace(SMOKE["iid"], trials=1)}
    monkeypatch.setattr("fedloom_studies.map.setups.read_setups", lambda _scale: known)
    called(*words, "later", "--out", "runs/later")
    known["iid"] = replace(known["iid"], plan=(3,))
    assert "3" in called(*words, "later", "--list")
    called(*words, "later", "--out", "runs/later")
    called(*words, "once", "--out", "runs/once")
    later, once = (read_records(Path(name, "map-smoke.jsonl")) for name in ("later", "once"))
    assert {key: replace(r, minutes=0) for key, r in later.items()} == {
        key: replace(r, minutes=0) for key, r in once.items()
    }
    assert {tuple(r.seeds) for r in later.values()} == {("0", "20", "21")}
    before = Path("later", "map-smoke.jsonl").read_bytes()
    called(*words, "later", "--out", "runs/later")
    assert Path("later", "map-smoke.jsonl").read_bytes() == before


def test_a_record_is_written_and_read_alike(tmp_path: Path) -> None:
    one = record(FULL["iid"], "fedavg", [0.5, 0.6], chosen={"local.lr": 0.1}, trials=[({"local.lr": 0.1}, 0.5)])
    other = record(FULL["iid"], "local", [0.5, 0.6])
    for each in (other, one, other):
        record_cell(each, tmp_path / "map.jsonl")
    assert [method for _, method in read_records(tmp_path / "map.jsonl")] == ["fedavg", "local"]
    found = read_records(tmp_path / "map.jsonl")["iid", "fedavg"]
    assert json.loads(json.dumps(found.__dict__)) == json.loads(json.dumps(one.__dict__))


def test_estimates_come_first_and_follow_what_was_measured(here: Path) -> None:
    setup = FULL["iid"]
    plain = estimate_setups([setup], cells_to_run([setup], {}, ["fedavg"]), {}, None)[0]
    assert plain["due"] == 2
    assert plain["estimate"] > 0
    slow = {("iid", "local"): record(setup, "local", [0.5] * 5, minutes=100.0)}
    (row,) = estimate_setups([setup], cells_to_run([setup], slow, ["fedavg"]), slow, None)
    assert row["estimate"] > plain["estimate"]
    assert "would fit" in row["note"]
