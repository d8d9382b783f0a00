"""A page per method, from its card, its options and its place on the map."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import formulas

from fedloom.algorithms import REGISTRY, Preset
from fedloom.lab.experiment.cards import card_text, list_families
from fedloom.values import fields_of
from fedloom_studies.map.judge import SetupVerdict, judge_setup
from fedloom_studies.map.page import standing_table
from fedloom_studies.map.records import NOT_RUN_STATUS, read_records
from fedloom_studies.map.setups import read_setups
from fedloom_studies.store import CHECKOUT_FOLDER


def link(found: re.Match[str]) -> str:
    """The link to a method's page, from one to its file: the stem, and the name of a preset."""
    stem, preset = found[1], found[2]
    names = {entry.__module__.rpartition(".")[2]: name for name, entry in REGISTRY.items() if isinstance(entry, type)}
    return f"](methods/{preset or names.get(stem, 'index')}.md"


ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = ROOT / "studies" / "data" / "defaults.json"
HELD_OUT = ROOT / "studies" / "data" / "held-out.json"
COLUMNS = ("mean, %", "over the better of local and FedAvg", "verdict", "place")
"""Of `standing_table`."""
FAMILIES = {
    "consensus": "One model for all",
    "clustered": "One model per cluster",
    "composite": "With a regularizer",
    "personalised": "One model per client",
    "fair": "Fair",
    "preset": "Combinations of parts",
    "reference": "For reference",
}
DEFAULTS_SAY = (
    "This page runs every method with its default settings. The slow tests check these conditions "
    "(`packages/fedloom/tests/algorithms/test_works_as_it_comes.py`):",
    "",
    "- The run does not diverge.",
    "- The better of the method's models scores at most 5 points below the worse of FedAvg and local training (8 "
    "points for fair methods).",
    "- The method takes at most 6 times FedAvg's gradients.",
    "- Its models differ from FedAvg and local training by more than two runs of FedAvg differ.",
    "- Fair methods improve the worst tenth or the variance of the training losses (FairFed: the weighted gap of the "
    "accuracies). Personal models of personalized methods beat their global model. Composite methods with a "
    "regularizer that creates zeros get zeros.",
    "",
    "If a method cannot meet a condition, its page and a note before the first round state this fact.",
    "",
    "Some factors are open in theory. Their defaults were chosen on validation data of other federations "
    "(`studies/benchmarks/factors.py`, `studies/data/factors.json`). Some constants of a paper depend on the paper's "
    "problem. fedloom then computes the default before the first round from the *reach* of a round: the learning rate "
    "times the mean number of local steps. The page of each method states the rule.",
    "",
    'With `defaults = "paper"`, fedloom uses the papers\' own constants, which `fedloom describe` lists. With '
    '`defaults = "released"`, it uses the papers\' public code if the code differs from the paper.',
)
HELD_OUT_SAYS = (
    "These federations influenced no rule, and their results are judged on validation data. They use other data, a "
    "convolutional network, partial participation, other learning rates, five clients and a hundred clients. A row "
    "states each broken condition and its reason. The rules of AFL, Ditto, Equitable-FL and FedADMM were changed, "
    "based on theory, after a look at these results. FedSLR's rule was changed after it had diverged on MNIST with "
    "a convolutional network."
)
HEADS = ("Problem", "Reference", "References", "Client state", "Deviations", "Defaults", "Public code", "Attackers")
LIMITS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))


def pages() -> Iterator[tuple[str, str]]:
    """Path and content of the index and of every method's page."""
    yield "methods/index.md", index()
    yield "methods/defaults.md", defaults()
    for name in REGISTRY:
        yield f"methods/{name}.md", page(name)


def navigation() -> list[Any]:
    """The methods by family, for the menu."""
    groups = [
        {FAMILIES.get(family, family): [{_title(name): f"methods/{name}.md"} for name, _ in entries]}
        for family, entries in _families().items()
    ]
    return ["methods/index.md", "methods/defaults.md", *groups]


def index() -> str:
    """All methods, with one line each."""
    lines = [
        "# Methods",
        "",
        "A program writes each page from the source file of the method. `fedloom list` prints the same list.",
        "",
    ]
    for family, entries in _families().items():
        lines += [f"## {FAMILIES.get(family, family)}", "", "| method | name in files | |", "|---|---|---|"]
        lines += [f"| [{_title(name)}]({name}.md) | `{name}` | {_cell(line)} |" for name, line in entries]
        lines.append("")
    return "\n".join(lines)


def defaults() -> str:
    """What every method does as it comes, from the recorded runs."""
    lines = ["# Methods with default settings", "", *DEFAULTS_SAY, "", "## Development", "", *_judged(DEFAULTS)]
    lines += ["## Held-out federations", "", HELD_OUT_SAYS, "", *_judged(HELD_OUT)]
    return "\n".join(lines)


def _judged(file: Path) -> Iterator[str]:
    """How the runs of a file were made, and a table of every federation."""
    found = json.loads(file.read_text())
    local = ", ".join(f"{key} = {value}" for key, value in found["local"].items())
    commits = " and ".join(dict.fromkeys(row["commit"] for row in found["rows"]))
    yield from (
        f"{found['rounds']} rounds, {local}. `{found['command']}` produced the results at commit {commits}.",
        "",
    )
    for case, title in found["cases"].items():
        rows = [row for row in found["rows"] if row["case"] == case]
        if not rows:
            continue
        measured = f"Mean {found['part']} {rows[0]['metric']} over clients (%)."
        yield from (f"### {title[:1].upper() + title[1:]}", "", measured, "")
        yield "| method | global | personal | worst tenth | gradients | the law |"
        yield "|---|---|---|---|---|---|"
        for row in rows:
            means = [_percent(row["models"].get(model, {}).get("mean")) for model in ("global", "personal")]
            best = max(row["models"].values(), key=lambda figure: figure["mean"])
            said = "; ".join([*row["broken"], row["known"]] if row["broken"] else ["holds", *row["excused"]])
            cells = [
                f"[{row['method']}]({row['method']}.md)",
                *means,
                _percent(best["worst"]),
                f"{row['gradients']:.1f}",
            ]
            yield f"| {' | '.join([*cells, _cell(said)])} |"
        missing = [name for name in REGISTRY if name not in {row["method"] for row in rows}]
        yield from ("", f"Not measured yet: {', '.join(missing)}." if missing else "", "")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def page(name: str) -> str:
    """The card of a method as Markdown."""
    entry = REGISTRY[name]
    first, *parts = card_text(entry).split("\n\n")
    line = first.partition(": ")[2]
    lines = [f"# {_title(name)}", "", _prose(line[:1].upper() + line[1:]), ""]
    lines += ["```toml", "[[method]]", f'algorithm = "{name}"', "```", ""]
    for part in parts:
        if part.startswith("    "):
            lines += [*_table(part), ""]
            continue
        head, colon, rest = part.partition(": ")
        if head == "Problem" and (set_as := formulas.problems().get(name)):
            lines += ["**Problem.**", "", formulas.display(set_as["problem"]), "", set_as.get("where", ""), ""]
        elif colon and head in HEADS:
            lines += [f"**{head}.** {_prose(rest)}", ""]
        else:
            lines += [f"**When.** {_prose(part)}", ""]
    lines += ["## Options", "", *_options(entry), ""]
    lines += _on_the_map(name)
    if not isinstance(entry, Preset):
        lines += ["## The code", "", "```python", _code(entry), "```", ""]
    lines += ["Compatible options: [table of combinations](../combinations.md).", ""]
    return "\n".join(lines)


@cache
def _judged_setups() -> tuple[SetupVerdict, ...]:
    records = read_records(ROOT / CHECKOUT_FOLDER / "map-full.jsonl")
    return tuple(judge_setup(setup, records) for setup in read_setups("full").values())


def _on_the_map(name: str) -> Iterator[str]:
    """Where a method stands in every setup of the map that was run."""
    judged = {j.setup.name: j for j in _judged_setups()}
    rows = [row for row in standing_table(judged.values(), [name]) if row["state"] != NOT_RUN_STATUS]
    yield from ("## Benchmark results", "")
    if not rows:
        yield from ("Not run.", "")
        return
    yield (
        "The table shows the mean test accuracy (hospitals: AUROC) over clients and seeds, after equal tuning of all "
        "methods. The [benchmark map](../map.md) explains the measurement."
    )
    yield from ("", f"| clients | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}")
    for row in rows:
        setup = judged[row["setup"]].setup
        cells = [row.get(column, "") for column in COLUMNS]
        cells[0] = cells[0] or row["state"]
        yield f"| [{setup.title}](../map/{setup.name}.md) | {' | '.join(cells)} |"
    yield ""


def _families() -> dict[str, list[tuple[str, str]]]:
    found = list_families()
    order = [*FAMILIES, *(name for name in found if name not in FAMILIES)]
    return {name: found[name] for name in order if name in found}


def _title(name: str) -> str:
    first = card_text(REGISTRY[name]).splitlines()[0].partition(":")[0]
    return {"fedamp": "FedAMP", "heurfedamp": "HeurFedAMP"}.get(name, first)


def _options(entry: Any) -> list[str]:
    fields = fields_of(entry)
    if not fields:
        return ["None."]
    lines = ["| option | default | range | |", "|---|---|---|---|"]
    for key, field in fields.items():
        limits = [f"{sign} {getattr(m, name)}" for m in field.metadata for name, sign in LIMITS if hasattr(m, name)]
        default = "not set" if field.default is None else f"`{field.default!r}`"
        lines.append(f"| `{key}` | {default} | {', '.join(limits)} | {_cell(field.description or '')} |")
    return lines


def _table(block: str) -> list[str]:
    head, *rows = [re.split(r" {2,}", line.strip()) for line in block.splitlines()]
    width = len(head)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * width]
    for row in rows:
        cells = [*row[: width - 1], " ".join(row[width - 1 :])] + [""] * (width - len(row))
        names = [f"`{cell}`".replace("|", "\\|") if cell else "" for cell in cells[: width - 1]]
        if head[0] == "paper":
            names[0] = formulas.symbols(cells[0]) or names[0]
        lines.append(f"| {' | '.join([*names, _cell(cells[width - 1])])} |")
    return lines


def _prose(paragraph: str) -> str:
    """Text of a docstring: what Markdown would read as markup is left as it is."""
    flat = paragraph.replace("``", "`").replace("\n", " ")
    pieces = flat.split("`")
    return "`".join(_plain(piece) if place % 2 == 0 else piece for place, piece in enumerate(pieces))


def _plain(piece: str) -> str:
    return re.sub(r"([*_\[\]|\\])", r"\\\1", piece).replace("<", "&lt;")


def _cell(value: str) -> str:
    return _prose(value)


def _code(entry: Any) -> str:
    """The source of a method's module without its docstring, which is the page."""
    source = inspect.getsource(inspect.getmodule(entry))  # type: ignore[arg-type]
    first = ast.parse(source).body[0]
    return "\n".join(source.splitlines()[first.end_lineno :]).strip()
