"""The table of the system: every row is one that runs, and the page's statements are those of the records."""

from __future__ import annotations

import json
import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from fedloom.engine.setup import check
from fedloom.lab.experiment import parse
from fedloom_studies.reproduce.choices import first_candidate_experiment, method_candidates

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "studies" / "scripts" / "system"


@pytest.fixture(scope="module")
def system() -> Any:
    loader = SourceFileLoader("system_table", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_row_of_the_table_runs_after_equal_trials(system: Any) -> None:
    recipe = system.federation_recipes()["groups"]
    assert [*recipe.variants] == ["groups", "groups, sign flip", "groups, label poisoning"]
    for document in recipe.make_documents("full").values():
        parse(first_candidate_experiment(document), "system")
    for document in recipe.make_documents("smoke").values():
        experiment = parse(first_candidate_experiment(document), "system")
        fed = experiment.partition(experiment.source.read(None), 0)
        for method in experiment.methods:
            check(method.setting, fed)
        assert {len(method_candidates(method)) for method in document["method"]} == {8}


def records_of(system: Any, federations: list[str]) -> list[dict[str, Any]]:
    """Records of runs whose parts are worth something, nothing, or harm, by the row and the setting."""
    rng, recipes, made = np.random.default_rng(0), system.federation_recipes(), []
    for federation in federations:
        numbers: dict[str, Any] = {}
        for setting in recipes[federation].variants:
            easy, numbers[setting] = rng.normal(0, 0.03, 5), {}
            for row, label in enumerate(system.labels()):
                gain = 0.03 * ((row % 3) - 1) if " + " in label else 0.0
                model = "global" if label.startswith(("fedavg", "fiaelt", "equitable")) else "personal"
                values = 0.8 + easy + gain + rng.normal(0, 0.006, 5)
                for figure in system.FIGURES:
                    numbers[setting][f"{label}: {model}: {figure}"] = {str(s): float(v) for s, v in enumerate(values)}
        recipe = f"system-{federation}"
        facts = {"choices": {}, "failures": [], "minutes": 1.0, "machine": "a processor"}
        made.append({"recipe": recipe, "scale": "full", "numbers": numbers, **facts})
    return made


def check_page(system: Any, records: list[dict[str, Any]], text: str) -> None:
    """Hold the findings of a page to what scipy and statsmodels make of the records."""
    records = [record for record in records if record["recipe"] != "system-rules"]
    entry = next((record["numbers"] for record in records if record["recipe"] == "system-entry"), {})
    whole = {s: table for record in records if record["numbers"] is not entry for s, table in record["numbers"].items()}
    left_out = {name for name, one in system.entries(whole, entry).items() if not one.enters}
    numbers = {s: table for s, table in whole.items() if s.partition(",")[0] not in left_out}

    def accuracies(setting: str, label: str) -> dict[str, float]:
        references = (f"{label}: {model}: accuracy" for model in ("personal", "global"))
        by_seed = next((numbers[setting][r] for r in references if r in numbers[setting]), {})
        return {seed: value for seed, value in by_seed.items() if value is not None}

    clear, gains = set[tuple[str, str, str]](), dict[tuple[str, str], float]()
    for setting in numbers:
        pairs, p, means = [], [], []
        for label in (label for label in system.labels() if " + " in label):
            with_part, without = accuracies(setting, label), accuracies(setting, label.split(" + ")[0])
            seeds = sorted(with_part.keys() & without.keys())
            if len(seeds) >= 5:
                ends = [[by_seed[seed] for seed in seeds] for by_seed in (with_part, without)]
                pairs.append(label)
                means.append(100 * float(np.mean(np.subtract(*ends))))
                p.append(float(stats.ttest_rel(*ends).pvalue))
        rejected = multipletests(p, method="holm")[0] if p else []
        for label, mean, sure in zip(pairs, means, rejected, strict=True):
            row = next(r for r in text.split(f"### {setting}\n")[1].splitlines() if r.startswith(f"| {label} |"))
            word = ("better" if mean > 0 else "worse") if sure else "inconclusive"
            assert row.split("|")[-3].strip().endswith(f", {word}")
            assert float(row.split("|")[-3].split()[0]) == pytest.approx(mean, abs=0.051)
            if sure:
                clear.add((label, setting, "better" if mean > 0 else "worse"))
                gains |= {(label, setting): mean} if mean > 0 else {}
    listed = set[tuple[str, str, str]]()
    for name, method, rest in re.findall(r"^- \*\*(.*)\*\* on `(.*)`: (.*)$", text, re.MULTILINE):
        for word, settings in re.findall(r"([Bb]etter|[Ww]orse) in (.*?\))\.", rest):
            listed |= {(f"{method} + {name}", s, word.lower()) for s in re.findall(r"(?:^|; )([a-z, ]+) \(", settings)}
    assert listed == clear
    better, worse = (len({label for label, _, word in clear if word == w}) for w in ("better", "worse"))
    (head,) = re.findall(r"Of (\d+) parts, (\d+) increase .* and (\d+) reduce", text)
    assert tuple(map(int, head))[1:] == (better, worse)
    check_headline(text, gains, {label for label, _, _ in clear})
    check_gains(system, text, {s: {label: accuracies(s, label) for label in system.labels()} for s in numbers})


def check_gains(system: Any, text: str, by_setting: dict[str, dict[str, dict[str, float]]]) -> None:
    """Hold every row's gain over the better of local training and FedAvg, and the last sentence, to scipy."""
    beat = dict[str, list[str]]()
    for setting, rows in by_setting.items():
        means = {label: float(np.mean([*row.values()])) for label, row in rows.items() if row}
        reference = max(("local", "fedavg"), key=lambda label: means[label])
        alone = [label for label in means if " + " not in label and label != "local"]
        single = max(alone, key=lambda label: means[label])

        def tested(
            pairs: list[tuple[str, str]], rows: dict[str, dict[str, float]] = rows
        ) -> dict[Any, tuple[float, bool]]:
            ends = [([rows[a][s] for s in sorted(rows[a])], [rows[b][s] for s in sorted(rows[b])]) for a, b in pairs]
            p = [float(stats.ttest_rel(*both).pvalue) if both[0] != both[1] else 1.0 for both in ends]
            rejected = multipletests(p, method="holm")[0]
            gaps = [float(np.mean(np.subtract(*both))) for both in ends]
            return dict(zip(pairs, zip(gaps, rejected, strict=True), strict=True))

        section = text.split(f"### {setting}\n")[1].split("###")[0]
        assert f"| difference from {reference} |" in section
        for (label, _), (gap, sure) in tested(
            [(label, reference) for label in means if label not in ("local", "fedavg")]
        ).items():
            cell = next(r for r in section.splitlines() if r.startswith(f"| {label} |")).split("|")[-2].strip()
            assert cell.endswith(f", {('better' if gap > 0 else 'worse') if sure else 'inconclusive'}")
            assert float(cell.split()[0]) == pytest.approx(100 * gap, abs=0.051)
        combined = [label for label in means if " + " in label]
        found = tested([(label, rival) for label in combined for rival in ("local", single)])
        beat[setting] = [k for k in combined if all(found[k, r][0] > 0 and found[k, r][1] for r in ("local", single))]
    sentences = [line for line in text.splitlines() if "both local training and the best single method" in line]
    for sentence in sentences:
        for setting, names in beat.items():
            if names:
                assert re.search(rf"{re.escape(system.listed([f'`{n}`' for n in names]))} in {setting}[;.]", sentence)
        assert any(beat.values()) != ("In no setting does" in sentence)


def test_a_federation_enters_with_a_floor_and_room_for_a_method_to_be_better(system: Any) -> None:
    records = records_of(system, ["labels", "groups", "writers"])
    room = {"labels": 0.0, "groups": 0.05, "writers": 0.05}
    for record in records:
        name = record["recipe"].removeprefix("system-")
        for reference, by_seed in record["numbers"][name].items():
            if reference.startswith("fedslr: "):
                record["numbers"][name][reference] = {s: v + room[name] for s, v in by_seed.items()}
    pooled = {
        name: {"pooled: global: accuracy": dict.fromkeys("01234", 0.5 if name == "writers" else 0.9)} for name in room
    }
    facts = {"choices": {}, "failures": [], "minutes": 1.0, "machine": "a processor"}
    entry = {"recipe": "system-entry", "scale": "full", "numbers": pooled, **facts}
    text = system.page([entry, *records])
    assert re.findall(r"^\| (\w+) \| .* \| (yes|no) \|$", text, re.MULTILINE) == [
        ("labels", "no"), ("groups", "yes"), ("writers", "no")
    ]  # fmt: skip
    assert "### groups\n" in text
    assert "### labels" not in text
    assert "### writers" not in text
    assert len(re.findall("both local training and the best single method", text)) == 1
    check_page(system, [entry, *records], text)


def check_headline(text: str, gains: dict[tuple[str, str], float], clear: set[str]) -> None:
    """Hold the first sentence to the clear gains, in points by part and setting, and the second to the other parts."""
    named = re.findall(r"([a-z+ -]+) on `([a-z]+)` \(\+([0-9.]+) ± [0-9.]+ in ([a-z, ]+?)\)", text.split(".**")[0])
    largest = dict[str, tuple[float, str]]()
    for (label, setting), gain in gains.items():
        largest[label] = max(largest.get(label, (0.0, "")), (gain, setting))
    best = sorted(largest.items(), key=lambda item: -item[1][0])[:3]
    names = [name.removeprefix(" and").strip(" ,:") for name, *_ in named]
    assert [(f"{method} + {name}", where) for name, (_, method, _, where) in zip(names, named, strict=True)] == [
        (label, setting) for label, (_, setting) in best
    ]
    for (_, _, points, _), (_, (gain, _)) in zip(named, best, strict=True):
        assert float(points) == pytest.approx(gain, abs=0.051)
    without = re.findall(r"the effect is inconclusive for (.*?)\. Of", text)
    shown = {
        f"{m} + {n.removeprefix('and ')}" for line in without for n, m in re.findall(r"([a-z+ -]+?) on `(.*?)`", line)
    }
    rows = {f"{method} + {name}" for name, method in re.findall(r"^- \*\*(.*)\*\* on `(.*)`:", text, re.MULTILINE)}
    assert {" ".join(name.split()).replace("+ and ", "+ ") for name in shown} == rows - clear


def test_the_page_states_what_other_libraries_find_in_the_records(system: Any, tmp_path: Path) -> None:
    records, out, where = records_of(system, ["labels", "groups"]), tmp_path / "out", tmp_path / "system.md"
    out.mkdir()
    (out / "papers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    system.write_page(out, tmp_path / "kept.jsonl", where)
    text = where.read_text()
    check_page(system, records, text)
    assert {"better", "worse"} <= set(re.findall(r"(better|worse) in ", text.lower()))
    assert "Not run: writers; writers, sign flip; writers, label poisoning." in text
    assert where.with_suffix(".svg").read_text().startswith("<svg")
    system.write_page(tmp_path / "nowhere", tmp_path / "none.jsonl", where)
    assert "**Not run.**" in where.read_text()


def test_the_page_is_that_of_its_records(system: Any) -> None:
    records = [record for record in system.read_records_of_file(system.RECORDS) if record["scale"] == "full"]
    text = system.PAGE.read_text()
    assert text == system.page(records)
    if records:
        check_page(system, records, text)
    for record in (one for one in records if one["recipe"] == "system-rules"):
        check_rules(system, text, record["numbers"]["all"])


def check_rules(system: Any, text: str, numbers: dict[str, dict[str, float]]) -> None:
    """Hold the sentences on rules and uploads to scipy."""
    section = text.split("## Robust rules for each kind of upload\n")[1].split("\n## ")[0]
    methods = re.findall(r"^\| ([a-z]+) \| .* ± ", section, re.MULTILINE)
    ends = [
        [[*numbers[f"{m} + {kind}: global: accuracy"].values()] for kind in ("multi-krum", "median")] for m in methods
    ]
    sure = multipletests([float(stats.ttest_rel(*both).pvalue) for both in ends], method="holm")[0]
    gaps = [float(np.mean(np.subtract(*both))) for both in ends]
    for start, sign in (("Multi-Krum is clearly better", 1), ("The median is clearly better", -1)):
        named = re.findall(rf"{start}.*? for the uploads of (.*?)\.", section)
        listed = {name for line in named for name in re.findall("`([a-z]+)`", line)}
        assert listed == {m for m, gap, clear in zip(methods, gaps, sure, strict=True) if clear and sign * gap > 0}
    assert len(methods) > 4


def test_the_rules_and_uploads_are_compared_method_by_method(system: Any) -> None:
    recipe, rng = system.rules_recipe(), np.random.default_rng(0)
    (document,) = recipe.make_documents("full").values()
    parse(document, "rules")
    numbers = {}
    for k, method in enumerate(document["method"]):
        gain = 0.1 * (k % 4 - 1.5) * (method["aggregator"]["kind"] == "multi-krum")
        numbers[f"{method['label']}: global: accuracy"] = {str(s): 0.7 + gain + rng.normal(0, 0.01) for s in range(5)}
    facts = {"choices": {}, "failures": [], "minutes": 1.0, "machine": "a processor"}
    record = {"recipe": "system-rules", "scale": "full", "numbers": {"all": numbers}, **facts}
    check_rules(system, system.page([*records_of(system, ["labels"]), record]), numbers)


def test_the_table_has_the_variance_over_clients_once_it_is_recorded(system: Any) -> None:
    records = records_of(system, ["labels"])
    rows = [row for row in system.page(records).split("### labels\n")[1].splitlines() if row.startswith("| ")]
    assert "variance, points²" in rows[0]
    for record in records:
        for references in record["numbers"].values():
            for reference in [r for r in references if r.endswith("/variance")]:
                del references[reference]
    text = system.page(records)
    assert "No record has the variance yet." in text
    assert "points²" not in text
