"""Write the reference of experiment files: an overview and one page per table, from the classes that read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from fedloom.analyses import ANALYSES
from fedloom.choose import MIXERS, SAMPLERS, WEIGHERS
from fedloom.data.partitions import PARTITIONS, Partition
from fedloom.data.sources import SOURCES
from fedloom.engine.early_stop import EarlyStop
from fedloom.engine.setting import Engine, Evaluate
from fedloom.lab.experiment.cards import list_parts
from fedloom.lab.experiment.schema import TopLevelKeys
from fedloom.lab.experiment.tuning import Range, Tune
from fedloom.local import LocalSGD
from fedloom.models import MODEL_CLASSES, PAPER_NETWORKS, Augment
from fedloom.options import get_limits
from fedloom.rows.aggregators import AGGREGATORS
from fedloom.rows.attacks import ATTACKS
from fedloom.rows.channels import CHANNELS
from fedloom.schedule import DEVICES, SCHEDULES, DeviceClass
from fedloom.tasks import Objective
from fedloom.values import fields_of

DOCS = Path(__file__).resolve().parents[1]
COMMON_MIN_KINDS = 3
"""Kinds that must share an option before a page lists it once, at the top."""
ALIKE_MIN_OPTIONS = 6
"""Options that a kind must share with an earlier one before a page lists only the differences."""

START = """# Experiment file

An experiment file describes a comparison: the data, the split into clients, one model, and one
`[[method]]` table per method. Only `[data]` and one `[[method]]` are required. fedloom checks the file
before training. If a key is unknown, or a value has the wrong type or is out of range, the command stops.

```toml title="smallest.toml"
[data]
source = "digits"

[[method]]
algorithm = "fedavg"
```

`fedloom schema > fedloom.schema.json` writes a JSON schema that editors can use to complete and check the file.
The pages of this reference are generated from the code that reads the file.

## Tables
"""
METHOD = """Each method has [a page](../packages/fedloom/src/fedloom/algorithms/) with its own options. Every
`[[method]]` table also accepts these keys:

| key | meaning |
|---|---|
| `algorithm` | name of the method, required |
| `label` | unique name in tables and charts; default: the name of the method |
| `rounds` | number of rounds of this method |
| `client_weights` | client weighting of this method |
| `local` | keys of `[local]` for this method; all other keys keep their shared values |
| `sampler`, `aggregation_weights`, `personalized_aggregation` | replace the shared tables |
| `aggregator`, `attack`, `upload_transform`, `schedule` | replace the shared tables |

For example, this method uses a robust aggregator and its own learning rate:

```toml
[[method]]
algorithm = "fedavg"
label = "fedavg with multi-krum"
aggregator = { kind = "multi-krum", f = 2 }
local = { lr = 0.05, momentum = 0.9 }
```

## [grid]

A `[grid]` table runs every method with every combination of the listed values. Each combination is a separate method
whose label contains the values. Each key of `[grid]` is either an option of the methods, such as `lam`, or a setting
in a different table, such as `local.lr`. If a key has the prefix `method.LABEL.`, its values apply only to the
method with this label. See also [Ablations](cluster.md#ablations-a-grid).

```toml
[[method]]
algorithm = "ditto"

[grid]
local.lr = [0.05, 0.1]
lam = [0.1, 1.0]
```
"""


class Option(NamedTuple):
    """A row of a table: the key, its default and range as Markdown, and its meaning."""

    key: str
    default: str
    limits: str
    meaning: str

    def same(self) -> tuple[str, str, str]:
        """Return the row without its default."""
        return self.key, self.limits, self.meaning

    def line(self, default: str | None = None) -> str:
        """Return the row as Markdown."""
        return f"| `{self.key}` | {self.default if default is None else default} | {self.limits} | {self.meaning} |"


class Page(NamedTuple):
    """A page of the reference: its name, its title, an example, and what it lists."""

    name: str
    title: str
    lead: str
    example: str
    kinds: Mapping[str, Any] = {}
    shared: Mapping[str, type[BaseModel]] = {}
    key: str = "kind"


PAGES = [
    Page(
        "data",
        "[data]",
        "The samples. `source` is the name of a data set below, a path, or `hub:owner/name`. See "
        "also [Use your own table](../data.md) and [Use images and arrays](../data-images.md).",
        '[data]\nsource = "digits"',
        SOURCES,
        key="source",
    ),
    Page(
        "partition",
        "[partition]",
        "The split of the samples into clients. See also [Clients and non-IID splits](../data-clients.md).",
        '[partition]\nkind = "dirichlet"\nclients = 20\nalpha = 0.3\nvalidation = 0.2',
        PARTITIONS,
        {"Options of every kind": Partition},
    ),
    Page(
        "model",
        "[model]",
        "The network. The networks of papers are kinds with different defaults, and accept the options of the kind "
        "on which they are based.",
        '[model]\nkind = "mlp"\nhidden = [128, 64]',
        MODEL_CLASSES,
    ),
    Page(
        "task",
        "[task]",
        "The loss, the metrics and the class weights. By default, they follow from the data.",
        '[task]\nmetrics = ["balanced_accuracy", "recall"]\nclass_weights = "balanced"',
        shared={"Options": Objective},
    ),
    Page(
        "local",
        "[local]",
        "The local training of a client: learning rate, batch size, epochs and optimizer.",
        "[local]\nlr = 0.05\nbatch_size = 20\nepochs = 2",
        shared={"Options": LocalSGD},
    ),
    Page(
        "augment",
        "[augment]",
        "Random flips and crops of training images in every step.",
        "[augment]\nflip = 0.5\ncrop = 4",
        shared={"Options": Augment},
    ),
    Page(
        "sampler",
        "[sampler]",
        "The selection of the clients for each round. Without this table, all clients take part.",
        "[sampler]\nfraction = 0.1",
        SAMPLERS,
    ),
    Page(
        "aggregation_weights",
        "[aggregation_weights]",
        "Client weights for the mean of each round, computed during the run.",
        '[aggregation_weights]\nkind = "fairfed"',
        WEIGHERS,
    ),
    Page(
        "personalized_aggregation",
        "[personalized_aggregation]",
        "A separate mixture of the clients' last models for each client, which replaces the server's model.",
        '[personalized_aggregation]\nkind = "attention"',
        MIXERS,
    ),
    Page(
        "aggregator",
        "[aggregator]",
        "The rule that the server uses to combine uploads. Without this table, the server uses the weighted mean.",
        '[aggregator]\nkind = "multi-krum"\nf = 2',
        AGGREGATORS,
    ),
    Page(
        "attack",
        "[attack]",
        "An attack by dishonest clients. Use this table to test robust aggregators.",
        '[attack]\nkind = "sign-flip"\nfraction = 0.2',
        ATTACKS,
    ),
    Page(
        "upload_transform",
        "[upload_transform]",
        "A change to every upload: clipping, noise for [differential "
        "privacy](../differential-privacy.md), or compression.",
        '[upload_transform]\nkind = "top-k"',
        CHANNELS,
    ),
    Page(
        "devices",
        "[devices]",
        "The clients' speeds in [simulated time](../time.md). Without this table, a run has no simulated clock.",
        '[devices]\nkind = "lognormal"\nspread = 1.0\nspeed = 100',
        DEVICES,
        {"[devices.classes.NAME]": DeviceClass},
    ),
    Page(
        "schedule",
        "[schedule]",
        "The rule that determines which uploads the server waits for. In a simulation, all kinds except `synchronous` "
        "need `[devices]`.",
        '[devices]\nkind = "equal"\n\n[schedule]\nkind = "buffered"\nbuffer = 5',
        SCHEDULES,
    ),
    Page(
        "evaluate",
        "[evaluate]",
        "The rounds, clients and data that fedloom evaluates. See also [Evaluate clinical models](../clinical.md).",
        "[evaluate]\nevery = 5",
        shared={"Options": Evaluate},
    ),
    Page(
        "analysis",
        "[[analysis]]",
        "An analysis in addition to the training, with one table per analysis. See also [Evaluate clinical "
        "models](../clinical.md) and [Write your own analysis](../analyses.md).",
        '[[analysis]]\nkind = "groups"\nby = ["sex", "age>=75"]',
        ANALYSES,
    ),
    Page(
        "early_stop",
        "[early_stop]",
        "The condition for ending a run early. Without this table, a run trains for all rounds. See also [Follow and "
        "stop runs](../track-runs.md).",
        '[early_stop]\npatience = 5\nresult = "best"',
        {},
        {"Options": EarlyStop},
    ),
    Page(
        "engine",
        "[engine]",
        "Technical settings for a run: device, precision, processes and memory. See also [Use a GPU](../gpu.md).",
        '[engine]\ndevice = "cpu"\nworkers = 2',
        shared={"Options": Engine},
    ),
    Page(
        "tune",
        "[tune]",
        "The hyperparameter search. Only [`fedloom tune`](../tuning.md) reads this table.",
        '[tune]\ntrials = 20\n\n[tune.space.all]\n"local.lr" = { low = 0.01, high = 1.0, log = true }',
        shared={"Options": Tune, "A range in [tune.space]": Range},
    ),
]


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path below ``docs`` and the text of every page."""
    yield "experiment-file.md", overview()
    for page in PAGES:
        yield f"reference/{page.name}.md", text_of(page)


def overview() -> str:
    """Return the first page: the keys at the top, the list of tables, and ``[[method]]``."""
    lines = [START, "| table | contents |", "|---|---|"]
    lines += [f"| [`{page.title}`](reference/{page.name}.md) | {_first(page.lead)} |" for page in PAGES]
    lines += ["| [`[[method]]`](#method) | A method and its options |"]
    lines += [
        "| [`[grid]`](#grid) | Lists of option values to combine |",
        "",
        "## Keys at the top of the file",
        "",
    ]
    return "\n".join([*lines, *_table(_options(TopLevelKeys)), "", "## [[method]]", "", METHOD])


def text_of(page: Page) -> str:
    """Return the page of a table."""
    lines = [f"# {page.title}", "", page.lead, "", "```toml", page.example, "```", ""]
    for title, value in page.shared.items():
        lines += [f"## {title}", "", *_table(_options(value)), ""]
    if page.kinds:
        lines += _kinds(page)
    return "\n".join(lines).rstrip() + "\n"


def _kinds(page: Page) -> list[str]:
    """Return the lines of all kinds: options that several kinds share first."""
    known = {option.same() for value in page.shared.values() for option in _options(value)}
    rows = {
        name: [o for o in _options(value) if o.same() not in known]
        for name, value in page.kinds.items()
        if name not in PAPER_NETWORKS or page.kinds is not MODEL_CLASSES
    }
    owners: dict[tuple[str, str, str], list[str]] = {}
    for name, options in rows.items():
        for option in options:
            owners.setdefault(option.same(), []).append(name)
    common = {same: names for same, names in owners.items() if len(names) >= COMMON_MIN_KINDS}
    lines = []
    if common:
        lines += ["## Options of several kinds", ""]
        lines += ["| key | default | range | meaning | kinds |", "|---|---|---|---|---|"]
        for same, names in common.items():
            found = {o.default: o for name in names for o in rows[name] if o.same() == same}
            default = next(iter(found)) if len(found) == 1 else "see the kind"
            shown = "all" if len(names) == len(rows) else ", ".join(f"`{name}`" for name in names)
            lines.append(f"{next(iter(found.values())).line(default)} {shown} |")
        lines.append("")
    lines += ["## Kinds" if page.key == "kind" else "## Sources", ""]
    titles = dict(list_parts("models")) if page.kinds is MODEL_CLASSES else {}
    for position, (name, value) in enumerate(page.kinds.items()):
        first = titles[name] if name not in rows else (value.__doc__ or "").strip().partition("\n")[0]
        lines += [f'### {page.key} = "{name}"', "", _cell(first.replace("``", "`")), ""]
        if name not in rows:
            continue
        options = rows[name]
        like = _like(name, rows, [*rows][:position])
        if like is not None:
            missing = [o.key for o in rows[like] if o not in options]
            lines += [f"Accepts the options of `{like}`" + (f" except {_keys(missing)}." if missing else "."), ""]
            options = [o for o in options if o not in rows[like]]
        else:
            several = [o for o in options if o.same() in common]
            varied = {same for same, names in common.items() if len(_defaults(same, names, rows)) > 1}
            if several:
                stated = [f"`{o.key}`" + (f" = {o.default}" if o.same() in varied else "") for o in several]
                lines += [f"Options of several kinds: {', '.join(stated)}.", ""]
            options = [o for o in options if o.same() not in common]
        lines += [*_table(options), ""] if options else []
    return lines


def _like(name: str, rows: Mapping[str, list[Option]], earlier: list[str]) -> str | None:
    """Return the earlier kind with almost the same options, if there is one."""
    shared = {other: sum(o in rows[other] for o in rows[name]) for other in earlier if other in rows}
    best = max(shared, key=lambda other: shared[other], default=None)
    return best if best is not None and shared[best] >= ALIKE_MIN_OPTIONS else None


def _defaults(same: tuple[str, str, str], names: list[str], rows: Mapping[str, list[Option]]) -> set[str]:
    return {o.default for name in names for o in rows[name] if o.same() == same}


def _options(value: Any) -> list[Option]:
    """Return the options of a class in order."""
    found = []
    for key, field in fields_of(value).items():
        if key == "kind":
            continue
        limits = [limit.replace(">=", "≥").replace("<=", "≤") for limit in get_limits(field)]
        if not limits:
            limits = [f'`"{value}"`' for value in _allowed_texts(field.annotation)]
        if field.is_required():
            default = "required"
        else:
            default = _toml(field.get_default(call_default_factory=True))
        meaning = _cell((field.description or "").replace("None:", "not set:"))
        found.append(Option(key, default, ", ".join(limits), meaning))
    return found


def _allowed_texts(annotation: Any) -> list[str]:
    """Return the texts that an option accepts, or no text if it also accepts other values except None."""
    allowed = [value for a in get_args(annotation) if a is not NoneType for value in get_args(a) or [a]]
    return allowed if all(isinstance(value, str) for value in allowed) else []


def _table(options: list[Option]) -> list[str]:
    head = ["| key | default | range | meaning |", "|---|---|---|---|"]
    return [*head, *(option.line() for option in options)] if options else []


def _toml(value: Any) -> str:
    """Return a default as the file would contain it."""
    return "not set" if value is None else f"`{_literal(value)}`"


def _literal(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_literal(one)}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value) if isinstance(value, (str, bool)) else str(value)


def _keys(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _first(text: str) -> str:
    """Return the first sentence without its full stop, with links as seen from ``docs``."""
    return text.partition(". ")[0].rstrip(".").replace("](../", "](")


def _cell(value: str) -> str:
    spans = value.split("`")
    for place, span in enumerate(spans):
        if place % 2 == 0:
            for letter in "\\*_[]|":
                span = span.replace(letter, f"\\{letter}")
            span = span.replace("<", "&lt;")
        spans[place] = span.replace("|", "\\|") if place % 2 else span
    return "`".join(spans)


if __name__ == "__main__":
    (DOCS / "reference").mkdir(exist_ok=True)
    for path, text in pages():
        (DOCS / path).write_text(text)
