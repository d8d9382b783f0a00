"""Sum-based analyses over the nodes of a Flower app, with the same results as on the pooled samples.

No sample leaves a node.

Ranges, bins and rules come from the node's `Local`, never from a message. A node answers each step only once: for one
question, on the same samples as the first step. If a node cannot answer, it sends zeros. The server sees each node's
sums, so cells are merged until every node reaches the minimum count.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedloom.analyses import (
    Analysis,
    AnalysisResult,
    Bounds,
    ClientRows,
    Info,
    Question,
    client_rows,
    needs_run,
    require_questions,
    resolve_analysis,
    run_questions,
)
from fedloom.analyses.registry import get_analysis_name
from fedloom.data import Federation
from fedloom.data.survey.agreement import Agreement
from fedloom.errors import ConfigError, DataError, FedloomError, Refused, WireError, describe_error, escape_line
from fedloom.rundir import as_path
from fedloom_sites.deploy.analyses import (
    AgreedAnalysis,
    AnswerForm,
    SumTooLarge,
    check_rules,
    file_stem_of,
    make_agreement_schema,
)
from fedloom_sites.deploy.protocol.envelope import digest_arrays
from fedloom_sites.deploy.row_sets import columns_digest, judge_row_sets
from fedloom_sites.flower.records import VALUES_RECORD, head_of, make_array_record, read_tensors, write_values

ANALYZE_ACTION, STEPS_PREFIX, SETS_RECORD = "analyze", "fedloom.analysis.", "fedloom.analyses.sets"
"""Flower's name for analysis messages, and names of a node's records of answered steps and summed sets."""
GREETING_STEP = -1


@dataclass(frozen=True)
class Analyses:
    """Analyses that a node answers, as agreed on by its operators.

    Args:
        agreement: columns with their ranges, task and classes, as a file or a value. Samples must be rows with these
            columns.
        analyses: analysis objects, or tables that contain their ``kind``.
    """

    agreement: Agreement | Path | str
    analyses: Sequence[Any]

    def find(self, name: str, clients: int) -> AgreedAnalysis:
        """Return an analysis by its name, as it was agreed on for this number of nodes.

        Raises:
            ConfigError: the analysis was not agreed on, or cannot be applied to these columns.
        """
        for given in self.analyses:
            analysis = resolve_analysis(given, {})
            if get_analysis_name(analysis) == name:
                return agreed_analysis(analysis, self.agreement, clients)
        raise ConfigError(f"this node does not allow the analysis {name!r}. Add it to Local(analyses=Analyses(...))")


def agreed_analysis(analysis: Analysis, agreement: Agreement | Path | str, clients: int) -> AgreedAnalysis:
    """Return an analysis as the server and the nodes have agreed on it.

    Raises:
        ConfigError: the analysis cannot be applied to these columns.
    """
    agreed = agreement if isinstance(agreement, Agreement) else Agreement.read(Path(agreement))
    schema = make_agreement_schema(agreed, "app")
    require_questions(analysis)
    if analysis.uses_models:
        raise needs_run(analysis)
    check_rules(analysis)
    analysis.check(schema)
    analysis.check_sites(schema, masked=False)
    one = AgreedAnalysis(get_analysis_name(analysis), analysis, schema, clients, None)
    one.check_order()
    return one


def answer_step(values: Mapping[str, Any], analyses: Analyses | None, fed: Federation, state: RecordDict) -> RecordDict:
    """Answer a step of an analysis at a node, and return the answer.

    Args:
        values: the message's values.
        analyses: analyses that the node answers.
        fed: the node's samples.
        state: Flower's state, which stores the steps that have been answered.

    Raises:
        FedloomError: the analysis was not agreed on, or the question does not follow from the rules. This decision does
            not depend on the samples.
    """
    if analyses is None:
        raise ConfigError("this node has no analyses enabled. Pass them as Local(..., analyses=Analyses(...))")
    name, step, seat = str(values["analysis"]), int(values["step"]), int(values["client"])
    one = analyses.find(name, int(values["clients"]))
    if fed.data.task != one.schema.task or fed.data.x[0].numel() != len(one.schema.columns):
        raise ConfigError(
            f"the agreement has {len(one.schema.columns)} columns for a {one.schema.task}, but the "
            f"samples have {fed.data.x[0].numel()} for a {fed.data.task}"
        )
    rows = replace(client_rows(fed, 0), place=seat)
    flags = one.publish(rows)
    if step == GREETING_STEP:
        return RecordDict({VALUES_RECORD: write_values(rows=len(rows), flags=f"{flags:x}")})
    sizes, bits = [int(size) for size in values["sizes"]], [int(text, 16) for text in values["flags"]]
    if not 0 <= seat < len(sizes) == len(bits) == one.clients or (sizes[seat], bits[seat]) != (len(rows), flags):
        raise Refused("the sample or cell counts that the message states for this node are wrong")
    public, content = one.public(sizes, dict(enumerate(bits)), 0), bytes(values["question"])
    question, bounds = one.read_question(step, content, public)
    form = AnswerForm(bounds, one.clients)
    course = digest_arrays([json.dumps([seat, sizes, bits]).encode()])
    cells = torch.cat([rows.x, rows.y, rows.part[:, None].double(), rows.subjects[:, None].double()], 1)
    may_answer = _record_step(
        state, one.name, step, digest_arrays([content]), course, digest_arrays([cells.numpy().tobytes()])
    )
    silent = False
    try:
        may_answer &= _are_apart(state, one, one.analysis.row_sets(rows, public))
        if not may_answer:
            raise Refused(
                "the samples differ from the samples of the first step, or they differ from a "
                "previously summed set of rows in too few subjects"
            )
        vector, _, _ = one.answer(question, bounds, form, rows, public)
    except Exception as error:  # the server must not notice the error, because it depends on the samples
        sys.stderr.write(f"fedloom: step {step} of the analysis {name}: {escape_line(describe_error(error))}\n")
        vector, silent = form.zeros, True
    sums = make_array_record({"sums": torch.from_numpy(vector.view(np.int64).copy())})
    return RecordDict({VALUES_RECORD: write_values(client=seat, silent=silent), "answer": sums})


def _record_step(state: RecordDict, name: str, step: int, question: str, course: str, rows: str) -> bool:
    """Record a step before it is answered, and return True if the samples have not changed since the first step.

    If they have changed, the node sends zeros instead.

    Raises:
        Refused: the step was answered for a different question or under different terms.
    """
    kept = state.get(f"{STEPS_PREFIX}{name}")
    record: dict[str, Any] = (
        json.loads(str(kept["steps"]))
        if isinstance(kept, ConfigRecord)
        else {"rows": rows, "course": course, "steps": {}}
    )
    if record["course"] != course:
        raise Refused(f"the analysis {name} was started with different terms: nodes, sizes or cells have changed")
    if record["steps"].setdefault(f"{step}", question) != question:
        raise Refused(f"step {step} of the analysis {name} has already been answered for a different question")
    state[f"{STEPS_PREFIX}{name}"] = ConfigRecord({"steps": json.dumps(record)})
    return bool(record["rows"] == rows)


def _are_apart(state: RecordDict, one: AgreedAnalysis, sets: Sequence[ClientRows]) -> bool:
    """Return True if the row sets may be summed in addition to other analyses' row sets, and record the decision."""
    kept = state.get(SETS_RECORD)
    memory = json.loads(str(kept["memory"])) if isinstance(kept, ConfigRecord) else {"salt": secrets.token_hex(16)}
    salt, name = bytes.fromhex(memory["salt"]), f"{one.name} {one.analysis.model_dump_json()}"
    may_answer = judge_row_sets(memory, name, sets, columns_digest(one.schema), salt, one.rules.min_subjects)
    state[SETS_RECORD] = ConfigRecord({"memory": json.dumps(memory)})
    return may_answer


def analyze(
    grid: Grid,
    analysis: Analysis | str | Mapping[str, Any],
    agreement: Agreement | Path | str,
    *,
    timeout: float = 3600.0,
    folder: Path | str | None = None,
) -> AnalysisResult:
    """Run an analysis over the samples of all reachable nodes, using only sums, and return its result.

    >>> app = ServerApp()  # doctest: +SKIP
    >>> @app.main()  # doctest: +SKIP
    ... def main(grid, context):
    ...     print(analyze(grid, {"kind": "glm"}, "agreement.toml").table)

    Args:
        grid: Flower's grid.
        analysis: a value, a name, or a table with its ``kind``, which must be the same as at the nodes.
        agreement: columns with their ranges, which must be the same as at the nodes.
        timeout: number of seconds to wait for answers.
        folder: folder for the sums. Repeating the call resumes an interrupted analysis from them. If None, sums are not
            stored.

    Raises:
        ConfigError: the analysis cannot be applied to these columns.
        DataError: nodes do not answer, or the analysis yields no result.
    """
    value, nodes = resolve_analysis(analysis, {}), sorted(grid.get_node_ids())
    one = agreed_analysis(value, agreement, len(nodes))
    place = None if folder is None else as_path(folder, "folder", ", or None to keep nothing") / file_stem_of(one.name)
    common: dict[str, Any] = {"analysis": one.name, "clients": len(nodes)}
    greeted = _send_to_nodes(grid, nodes, {**common, "step": GREETING_STEP}, timeout)
    sizes, flags = ([values[key] for values, _ in greeted] for key in ("rows", "flags"))
    public, steps = one.public(sizes, dict(enumerate(int(text, 16) for text in flags)), 0), 0

    def ask(question: Question, bounds: Bounds) -> tuple[torch.Tensor, Info]:
        nonlocal steps
        step = steps if place is None else len([*place.glob("sum-*.bin")])
        steps, may_retry = steps + 1, step > 0 and question.name in value.retried
        nothing = torch.zeros_like(bounds.low)
        try:
            form = AnswerForm(bounds, len(nodes))
        except SumTooLarge:
            if not may_retry:
                raise
            return nothing, Info(len(nodes), 0, len(nodes), 0)  # the step is too long, so no node is asked
        message = {**common, "step": step, "question": question.encode(), "sizes": sizes, "flags": flags}
        total, silent = form.zeros, 0
        for values, records in _send_to_nodes(grid, nodes, message, timeout):
            vector = read_tensors(records, "answer")["sums"].numpy().astype(np.int64).view(np.uint64)
            form.decode(vector, 1)
            total, silent = total + vector, silent + bool(values["silent"])
        if not silent:
            numbers, clipped, rows = form.decode(total, len(nodes))
            return numbers, Info(len(nodes), clipped, 0, rows)
        if may_retry:
            return nothing, Info(len(nodes), 0, silent, 0)
        raise DataError(
            f"{silent} of {len(nodes)} nodes did not answer step {step + 1} of the analysis "
            f"{one.name}. The log of each such node states the reason"
        )

    state, log = run_questions(value, public, ask, place)
    table = value.result(state)
    return AnalysisResult(value, table, tuple(log), tuple(value.remarks(table)), value.model(state))


def _send_to_nodes(
    grid: Grid, nodes: Sequence[int], values: Mapping[str, Any], timeout: float
) -> list[tuple[dict[str, Any], RecordDict]]:
    """Send a message to every node, and return the replies in the order of the nodes.

    Raises:
        DataError: a node does not answer, or refuses to answer.
    """
    messages = list[Message]()
    for seat, node in enumerate(nodes):
        content = RecordDict({VALUES_RECORD: write_values(**values, client=seat)})
        messages.append(Message(content, dst_node_id=node, message_type=f"query.{ANALYZE_ACTION}"))
    replies = dict[int, tuple[dict[str, Any], RecordDict]]()
    for reply in grid.send_and_receive(messages, timeout=timeout):
        node = reply.metadata.src_node_id
        try:
            if reply.has_error():
                raise WireError(str(reply.error.reason))
            head = head_of(reply.content)
            if "error" in head:
                raise WireError(str(head["error"])[:500])
        except FedloomError as error:
            raise DataError(f"node {node} sent no answer: {error}") from None
        replies[node] = head, reply.content
    if missing := [node for node in nodes if node not in replies]:
        raise DataError(
            f"nodes {', '.join(map(str, missing))} did not answer within {timeout:g} s. Call the analysis again"
        )
    return [replies[node] for node in nodes]
