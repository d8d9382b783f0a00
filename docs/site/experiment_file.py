"""The reference of experiment files, from the values that read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedloom.analyses import ANALYSES
from fedloom.choose import MIXERS, SAMPLERS, WEIGHERS
from fedloom.data.partition import PARTITIONS, Partition
from fedloom.data.sources import SOURCES
from fedloom.engine.setting import Engine, Evaluate
from fedloom.lab.experiment.schema import Top
from fedloom.lab.experiment.tuning import Range, Tune
from fedloom.local import LocalSGD
from fedloom.models import KINDS, PAPERS, Augment
from fedloom.options import limits_of
from fedloom.rows.aggregate import AGGREGATORS
from fedloom.rows.attacks import ATTACKS
from fedloom.rows.channel import CHANNELS
from fedloom.schedule import DEVICES, SCHEDULES, DeviceClass
from fedloom.tasks import Objective
from fedloom.values import fields_of

PAGE = Path(__file__).resolve().parents[1] / "experiment-file.md"

START = """# Experiment file

An experiment file is a comparison: one federation, one model, and a `[[method]]` table for every method. Only `[data]`
and one `[[method]]` are needed. A key that does not exist, a wrong type or a value out of range is refused before any
work starts.

`fedloom schema > fedloom.schema.json` writes the same as a JSON schema, with which editors complete and check the file.
This page is made from the values that read the file.

```toml title="smallest.toml"
[data]
source = "digits"

[[method]]
algorithm = "fedavg"
```
"""
METHOD = """A method's own options are on [its page](../packages/fedloom/src/fedloom/algorithms/). Beside them,
every `[[method]]` may have:

| key | |
|---|---|
| `algorithm` | name of the method, required |
| `label` | what it is called in tables; the name when not given, and different for every method |
| `rounds` | rounds of this method alone |
| `weights` | clients' shares of the objective, of this method alone |
| `local`, `sampler`, `weigher`, `mixer`, `aggregator`, `channel`, `schedule` | for the shared ones; `local` by key |

```toml
[[method]]
algorithm = "fedavg"
label = "fedavg with multi-krum and momentum"
aggregator = { kind = "multi-krum", f = 2 }
local = { momentum = 0.9 }
```
"""
ANALYSIS_LEAD = (
    "What is computed beside the rounds, one table for each. A run writes the result of an analysis into a file of its "
    "own, and the report shows it. [Write your own analysis](analyses.md) has the form of an analysis."
)
MODEL_LEAD = (
    "`kind` is one of the following. A network of a paper takes every option of the kind that its first line names. "
    "Its table lists the options whose defaults differ."
)


def page() -> str:
    """The whole page."""
    parts = [
        START,
        _values("Top of the file", "", Top),
        _kinds("[data]", "`source` is a name of the list, a path, or `hub:owner/name`.", SOURCES, key="source"),
        _values("[partition]: what every kind takes", "How the samples are cut into clients.", Partition),
        _kinds("[partition]: kinds", "`kind` is one of", PARTITIONS, shared=Partition),
        _kinds("[model]", MODEL_LEAD, KINDS),
        _values("[task]", "What is minimised and measured, beside what the data's task has.", Objective),
        _values("[local]", "How clients train, whatever the method.", LocalSGD),
        _values("[augment]", "Random changes of training images.", Augment),
        _kinds("[sampler]", "Who takes part in a round.", SAMPLERS),
        _kinds("[weigher]", "How much a client counts in the mean.", WEIGHERS),
        _kinds(
            "[mixer]", "Each client's own mixture of the clients' last models, in place of the server's model.", MIXERS
        ),
        _kinds("[aggregator]", "How uploads become one; the weighted mean when there is none.", AGGREGATORS),
        _kinds("[attack]", "What a part of the clients does instead of being honest.", ATTACKS),
        _kinds("[channel]", "What an upload passes through on its way.", CHANNELS),
        _kinds(
            "[devices]",
            "How long clients take, in virtual time ([time](time.md)); no clock when there is none.",
            DEVICES,
        ),
        _values("[devices.classes.NAME]", "A class of devices.", DeviceClass),
        _kinds(
            "[schedule]",
            "Which uploads make a step of the server; all but `synchronous` need `[devices]`, except at real sites.",
            SCHEDULES,
        ),
        _values("[evaluate]", "", Evaluate),
        _values("[engine]", "How a run is computed.", Engine),
        _values("[tune]", "Read by [`fedloom tune`](tuning.md) only.", Tune),
        _values("A range of [tune.space]", "", Range),
        "## [[method]]\n\n" + METHOD,
        _kinds("[[analysis]]", ANALYSIS_LEAD, ANALYSES),
    ]
    return "\n".join(parts)


def _values(title: str, lead: str, value: type[BaseModel]) -> str:
    return "\n".join([f"## {title}", "", *([lead, ""] if lead else []), *_rows(value, {}), ""])


def _kinds(
    title: str, lead: str, registry: Mapping[str, Any], key: str = "kind", shared: type[BaseModel] | None = None
) -> str:
    lines = [f"## {title}", "", *([lead, ""] if lead else [])]
    for name, value in registry.items():
        first = (value.__doc__ or "").strip().splitlines()[0] if value.__doc__ else ""
        lines += [
            f'### {key} = "{name}"',
            "",
            _cell(first),
            "",
            *_rows(value, _unchanged(name) if name in PAPERS else {} if shared is None else fields_of(shared)),
            "",
        ]
    return "\n".join(lines)


def _unchanged(preset: str) -> dict[str, Any]:
    """Return the options of a paper's network whose defaults are its kind's."""
    kind = type(PAPERS[preset]).model_fields
    return {key: field for key, field in KINDS[preset].model_fields.items() if field.default == kind[key].default}


def _rows(value: Any, without: Mapping[str, Any]) -> list[str]:
    fields = {k: f for k, f in fields_of(value).items() if k not in without and k != "kind"}
    if not fields:
        return []
    lines = ["| key | default | range | |", "|---|---|---|---|"]
    for key, field in fields.items():
        limits = [limit.replace(">=", "≥").replace("<=", "≤") for limit in limits_of(field)]
        allowed = getattr(field.annotation, "__args__", ())
        if not limits and allowed and all(isinstance(a, str) for a in allowed):
            limits = [f"`{a}`" for a in allowed]
        if field.is_required():
            default = "required"
        else:
            found = field.get_default(call_default_factory=True)
            default = "not set" if found is None else f"`{found!r}`"
        lines.append(f"| `{key}` | {default} | {', '.join(limits)} | {_cell(field.description or '')} |")
    return lines


def _cell(value: str) -> str:
    for letter in "\\*_[]|":
        value = value.replace(letter, f"\\{letter}")
    return value.replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
