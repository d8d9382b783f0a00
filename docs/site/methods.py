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
from fedloom.lab.experiment.cards import families, text
from fedloom.values import fields_of
from fedloom_studies.map.judge import SetupVerdict, judge
from fedloom_studies.map.page import standing_table
from fedloom_studies.map.records import NOT_RUN, read_records
from fedloom_studies.map.setups import setups
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
    "clustered": "A model for every cluster",
    "composite": "With a regulariser",
    "personalised": "A model for every client",
    "fair": "Fair",
    "preset": "By composition",
    "reference": "For reference",
}
DEFAULTS_SAY = (
    "Every method with nothing but its name in the file, and the law that the slow tests hold it to "
    "(`packages/fedloom/tests/algorithms/test_works_as_it_comes.py`): the run does not diverge; the better of its "
    "models ends at most 5 points below the worse of FedAvg and Local (8 for fair methods); it takes at most 6 times "
    "FedAvg's gradients; its models differ from both by more than two runs of FedAvg do; and it does what it is for: "
    "a better worst tenth or less variance of the training losses for fair methods (FairFed: a smaller gap of the "
    "accuracies by its weights), personal models above the global one for personalised methods, zeros for composite "
    "methods with the regulariser that their card names. A method that cannot keep a part says so on its card and in "
    "a note before the first round.Factors that theory leaves open were chosen on validation parts of other "
    "federations than these (`studies/benchmarks/factors.py`, `studies/data/factors.json`).Where a paper's constant "
    "belongs to its own problem, the default is derived before the first round from the *reach* of a round, the step "
    "size times the mean number of local steps; every card gives its rule. paperflamepaperPython take the papers' own "
    "constants, which `fedloom describe` lists. Where a paper's public code runs something else than the paper "
    "prints, `released` takes the place of `paper`. 2x"
)
HELD_OUT_SAYS = (
    "The same law on federations that shaped no rule, judged on validation parts: other data, a convolutional network, "
    "partial participation, other step sizes, five clients and a hundred. A row that breaks the law says so, and why. "
    "The rules of AFL, Ditto, Equitable-FL and FedADMM were changed, by theory, after a look at these; FedSLR's was "
    "changed after it had diverged on MNIST with a network of convolutions."
)
HEADS = ("Problem", "Reference", "References", "Kept by a client", "Deviations", "Defaults")
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
    lines = ["# Methods", "", "Every page is made from the method's own file. `fedloom list` prints the same.", ""]
    for family, entries in _families().items():
        lines += [f"## {FAMILIES.get(family, family)}", "", "| method | name in files | |", "|---|---|---|"]
        lines += [f"| [{_title(name)}]({name}.md) | `{name}` | {_cell(line)} |" for name, line in entries]
        lines.append("")
    return "\n".join(lines)


def defaults() -> str:
    """What every method does as it comes, from the recorded runs."""
    lines = ["# Methods as they come", "", *DEFAULTS_SAY, "", *_judged(DEFAULTS)]
    lines += ["## Held out", "", HELD_OUT_SAYS, "", *_judged(HELD_OUT)]
    return "\n".join(lines)


def _judged(file: Path) -> Iterator[str]:
    """How the runs of a file were made, and a table of every federation."""
    found = json.loads(file.read_text())
    local = ", ".join(f"{key} = {value}" for key, value in found["local"].items())
    commits = " and ".join(dict.fromkeys(row["commit"] for row in found["rows"]))
    yield from (f"{found['rounds']} rounds, {local}. Made by `{found['command']}` at {commits}.", "")
    for case, title in found["cases"].items():
        rows = [row for row in found["rows"] if row["case"] == case]
        if not rows:
            continue
        measured = f"{found['part'].capitalize()} {rows[0]['metric']}, the mean over clients (%)."
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
    first, *parts = text(entry).split("\n\n")
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
    lines += ["What it goes with: [the table of combinations](../combinations.md).", ""]
    return "\n".join(lines)


@cache
def _judged_setups() -> tuple[SetupVerdict, ...]:
    records = read_records(ROOT / CHECKOUT_FOLDER / "map-full.jsonl")
    return tuple(judge(setup, records) for setup in setups("full").values())


def _on_the_map(name: str) -> Iterator[str]:
    """Where a method stands in every setup of the map that was run."""
    judged = {j.setup.name: j for j in _judged_setups()}
    rows = [row for row in standing_table(judged.values(), [name]) if row["state"] != NOT_RUN]
    yield from ("## On the map", "")
    if not rows:
        yield from ("Not run.", "")
        return
    yield (
        "Test accuracy, or AUROC at the hospitals, of the model that a client would use, the mean over clients and "
        "seeds; equal trials for every method. [The map](../map.md) says how it is measured."
    )
    yield from ("", f"| clients | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}")
    for row in rows:
        setup = judged[row["setup"]].setup
        cells = [row.get(column, "") for column in COLUMNS]
        cells[0] = cells[0] or row["state"]
        yield f"| [{setup.title}](../map/{setup.name}.md) | {' | '.join(cells)} |"
    yield ""


def _families() -> dict[str, list[tuple[str, str]]]:
    found = families()
    order = [*FAMILIES, *(name for name in found if name not in FAMILIES)]
    return {name: found[name] for name in order if name in found}


def _title(name: str) -> str:
    first = text(REGISTRY[name]).splitlines()[0].partition(":")[0]
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
