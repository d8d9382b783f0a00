"""Aggregation rules under attack: which combinations of a method with a rule are better than the baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fedloom.errors import ConfigError
from fedloom.formats import format_fixed
from fedloom.rundir import file_name
from fedloom_studies.map.judge import SetupVerdict, judge_setup
from fedloom_studies.map.measure import CellWork, hide_progress
from fedloom_studies.map.records import (
    DONE_STATUS,
    FAILED_STATUS,
    NOT_APPLICABLE_STATUS,
    CellRecord,
    new_record,
    read_records,
    record_cell,
)
from fedloom_studies.map.setups import REFERENCE_METHODS, rule_cells, rule_settings
from fedloom_studies.map.statements import (
    MAP_FOLDER,
    NO_DIFFERENCE,
    format_signed,
    join_with_and,
    list_rivals,
    share_of_cells,
    state_result,
    write_percent,
)
from fedloom_studies.reproduce import TimeBudget
from fedloom_studies.reproduce import summary as summaries

Records = Mapping[tuple[str, str], CellRecord]


def measure_rules(
    chosen_in: Records, file: Path, out: Path, data_dir: Path | None, budget: TimeBudget, say: Callable[[str], object]
) -> bool:
    """Run all combinations of a method, an aggregation rule and an attack that are missing from a file of records.

    Return True if all combinations have ended.

    Args:
        chosen_in: records of the map, whose chosen settings are used.
        file: file for the records of these combinations.
        out: folder for the run directories.
        data_dir: folder of data sets.
        budget: time limit of the runs.
        say: function that is called with a sentence about each combination.
    """
    recorded = read_records(file)
    for name, cell in rule_cells():
        source = chosen_in.get((rule_settings(), cell.method))
        if (cell.setup.name, name) in recorded or source is None:
            continue
        folder = out / file_name(cell.setup.name) / file_name(name)
        work = CellWork(cell, folder, data_dir, budget, lambda _rounds: hide_progress(0), None)
        try:
            with summaries.count_spent_time(folder, "cell"):
                fields = work.run_fields(cell.setup.seeds, source.chosen)
        except ConfigError as refused:
            record = new_record(cell, NOT_APPLICABLE_STATUS, str(refused).removeprefix(f"{cell.where}: "), 0.0)
        else:
            if fields is None:
                return False
            reason, minutes = fields.pop("reason"), summaries.spent_seconds(folder)["cell"] / 60
            status = FAILED_STATUS if reason else DONE_STATUS
            record = new_record(cell, status, reason, minutes, chosen=dict(source.chosen), **fields)
        record_cell(replace(record, method=name), file)
        say(f"{name}, {cell.setup.name}: {record.status}{record.reason and f': {record.reason}'}")
    return True


def judge_rules(records: Records) -> dict[str, SetupVerdict]:
    """Return the verdicts keyed by attack, for attacks with runs of all combinations."""
    setups = {cell.setup.name: cell.setup for _, cell in rule_cells()}
    whole = {attack for attack in setups if not _count_missing(records, attack)}
    verdicts = {name: judge_setup(setup, records) for name, setup in setups.items() if name in whole}
    return {name: j for name, j in verdicts.items() if j.reference}


def _count_missing(records: Records, attack: str = "") -> int:
    """Return the number of combinations without a record, under one attack or under all attacks."""
    cells = [(cell.setup.name, name) for name, cell in rule_cells() if attack in ("", cell.setup.name)]
    return sum(key not in records for key in cells)


def _say_missing(records: Records) -> str:
    count = len(list(rule_cells()))
    return f"{share_of_cells(count - _count_missing(records), count)}. To run the others, use `fedloom map --rules`."


def recommend_rule(verdicts: Mapping[str, SetupVerdict]) -> str:
    """Return sentences about the combinations that are better than the baseline, and about the best worst case."""
    better = {attack: [s for s in list_rivals(j) if s.better] for attack, j in verdicts.items()}
    won = [f"`{best[0].method}` under *{attack}* ({format_signed(best[0].gain or NO_DIFFERENCE)} points"
           f"{f', the best of {len(best)} combinations' * (len(best) > 1)})"
           for attack, best in better.items() if best]  # fmt: skip
    none = join_with_and([f"*{attack}*" for attack, best in better.items() if not best] or [""])
    parts = [f"**Better than the baseline: {join_with_and(won)}.**"] if won else []
    parts += [f"**No method is better than the baseline under {none}, with any rule.**"] if none else []
    means = {attack: {s.method: s.figures["mean"].mean for s in j.standings} for attack, j in verdicts.items()}
    common = set.intersection(*(set(of_attack) for of_attack in means.values()))
    lowest = {name: min((of[name], attack) for attack, of in means.items()) for name in sorted(common)}
    best = max(common - {*REFERENCE_METHODS}, key=lambda name: lowest[name], default="")
    if best:
        (points, attack), alone = lowest[best], lowest[REFERENCE_METHODS[0]][0]
        parts.append(
            f"`{best}` has the best worst case: {format_fixed(100 * points, 1)} % under *{attack}*. Local training "
            f"scores at least {format_fixed(100 * alone, 1)} % under every attack."
        )
    return " ".join(parts)


def advise_rule(records: Records) -> str:
    """Return the paragraph about aggregation rules on the map's page, or the command that runs them."""
    verdicts = judge_rules(records)
    link = f"[Four rules and three attacks]({MAP_FOLDER}/attack.md#aggregation-rules-under-attack)"
    return f"{link}: {recommend_rule(verdicts) if verdicts else _say_missing(records)}"


def rules_section(records: Records) -> Iterator[str]:
    """Yield the lines about aggregation rules for the page of the setup with attackers."""
    verdicts = judge_rules(records)
    yield from ("## Aggregation rules under attack", "")
    if not verdicts:
        yield from (_say_missing(records), "")
        return
    yield (
        f"{recommend_rule(verdicts)} The baseline is local training or FedAvg with the mean, whichever is better. Four "
        f"of the 20 clients attack. The settings were tuned in *{rule_settings()}*, which has the same clients but no "
        "attackers. The table shows the honest clients' mean accuracy in percent after 40 rounds, with an unadjusted "
        "95 % confidence interval across seeds. The verdict compares the method with the baseline under the same "
        "attack. It comes from moderated t-tests with Holm's correction for each column."
    )
    yield from ("", f"| method and rule | {' | '.join(verdicts)} |", f"|---{'|---' * len(verdicts)}|")
    names = dict.fromkeys(name for name, _ in rule_cells())
    for name in names:
        cells = []
        for j in verdicts.values():
            s = j.find(name)
            verdict = f", {s.verdict}" if s and s.gain else ", baseline" if s else ""
            cells.append(f"{write_percent(s.figures['mean'])}{verdict}" if s else "-")
        if any(cell != "-" for cell in cells):
            yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    for record in records.values():
        if record.status != DONE_STATUS and record.setup == next(iter(verdicts)):
            yield state_result(record)
    yield ""
