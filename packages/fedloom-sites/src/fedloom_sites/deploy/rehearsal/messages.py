"""Attacks with messages and files: budgets, replays, malformed and huge messages, disguised names, oversized tables."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord

from fedloom.analyses import Question, client_rows
from fedloom.analyses.patients import Groups
from fedloom.engine.privacy import epsilon
from fedloom.errors import FedloomError, describe_error, direction_in
from fedloom_sites.deploy.alarms import site_status
from fedloom_sites.deploy.analyses import DEFAULT_MIN_SUBJECTS
from fedloom_sites.deploy.noise import deployed_setting, get_site_noise
from fedloom_sites.deploy.protocol.envelope import (
    COMMON_FIELDS,
    REQUEST_FIELDS,
    common_head,
    digest_arrays,
    seal_message,
)
from fedloom_sites.deploy.rehearsal.copies import RehearsedSite
from fedloom_sites.deploy.rehearsal.outcomes import AttackOutcome, InapplicableAttack, judge_attack
from fedloom_sites.deploy.rehearsal.rogue import BLANK_VALUES, RogueServer
from fedloom_sites.deploy.rehearsal.samples import BUDGET_SETTINGS, ask_upload, change_first_sample
from fedloom_sites.deploy.secure import protocol as secure
from fedloom_sites.deploy.secure.terms import AnalysisStep
from fedloom_sites.deploy.settings import SharedSettings
from fedloom_sites.deploy.site.analyses import SiteAnalyses
from fedloom_sites.deploy.site.groups import SiteGroups
from fedloom_sites.deploy.site.local_data import read_data

MAX_ROUND_MODELS = int(SharedSettings.model_fields["models_per_round"].default)
"""Number of models in one round above which differences between answers reveal individual samples."""
TRIED_MODEL_COUNT = 12
MIN_GROUP_ROWS = int(Groups.model_fields["min_rows"].default)
"""Number of rows in a group, and in each of its classes, below which its statistics reveal single patients."""
BOMB_BYTES = 1 << 30
"""Number of bytes in a crafted table after decompression."""
BIDI_NAME = "age\u202egnp"


class BadMessage(NamedTuple):
    """Message that a site should reject.

    Attributes:
        name: description of what is wrong with the message.
        kind: kind of the message.
        head: fields of the message's head.
        arrays: arrays of the message.
        drop: field that is omitted from the head.
    """

    name: str
    kind: str
    head: Mapping[str, Any]
    arrays: Sequence[bytes]
    drop: str = ""


def write_good_message(site: RehearsedSite, rogue: RogueServer) -> BadMessage:
    """Return a valid message that requests the upload of the first round, after the first steps of a session."""
    download = rogue.download()
    if site.site.secure is None:
        return BadMessage("good", "train", {"round": 1, "weight": 0.5, "scored": -1}, [download])
    session = rogue.begin(1)
    inbox = secure.join_parts({p: parts[site.client] for p, parts in session.sealed.items() if p != site.client})
    arrays = [download, rogue.terms(1, download).encode(), inbox]
    return BadMessage("good", "masked", {"round": 1, "session": session.nonce}, arrays)


def write_bad_messages(site: RehearsedSite, rogue: RogueServer) -> Iterator[BadMessage]:
    """Yield messages that no site should answer, each with a single fault."""
    rounds = rogue.trainer.rounds
    heads: Mapping[str, Mapping[str, Any]] = {
        "another protocol": {"protocol": 10**9},
        "another version": {"release": "0.0.0"},
        "a path as the version": {"release": "../../etc/passwd"},
        "another experiment": {"experiment": "f" * 64},
        "a path as the experiment": {"experiment": "../../../../tmp/x"},
        "a disguised name": {"experiment": BIDI_NAME},
        "an escape sequence": {"release": "\x1b[2J\x07"},
        "another site's number": {"client": (site.client + 1) % max(2, site.clients)},
        "a nonexistent site number": {"client": 10**9},
        "round 0": {"round": 0},
        "a round below zero": {"round": -1},
        "a round beyond the last": {"round": rounds + 1},
        "a huge round": {"round": 2**62},
        "an accepted round in the future": {"accepted": rounds + 1},
        "an accepted round below zero": {"accepted": -5},
        "a wrong digest": {"digest": "0" * 64},
        "a text as the round": {"round": "1"},
        "an additional field": {"path": "/etc/passwd"},
        "a head of 2 MB": {"release": "x" * (2 << 20)},
    }
    for name, change in heads.items():
        good = write_good_message(site, rogue)
        yield good._replace(name=name, head={**good.head, **change})
    good = write_good_message(site, rogue)
    yield good._replace(name="no round", drop="round")
    yield good._replace(name="an unknown kind", kind="../shell")
    first, *rest = good.arrays
    for name, array in {
        "half a model": first[: len(first) // 2],
        "more than a model": first + bytes(8),
        "zero bytes": b"",
        "other bytes": bytes(range(256)) * 8,
        "a pickle": b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
    }.items():
        if site.site.secure is None:
            yield good._replace(name=name, arrays=[array])
        else:
            terms = rogue.terms(1, array).encode()
            yield write_good_message(site, rogue)._replace(name=name, arrays=[array, terms, *rest[1:]])
    yield good._replace(name="too many arrays", arrays=[*good.arrays, *[b"0"] * 6])
    yield good._replace(name="no arrays", arrays=[])
    if site.site.secure is not None:
        yield BadMessage("a plain training request", "train", {"round": 1, "weight": 0.5, "scored": -1}, [first])
        for step, count in {"masked": 3, "tally": 2, "agree": 1, "count": 1, "unmask": 1}.items():
            yield BadMessage(f"{step} without a session", step, {"round": 1, "session": b"0" * 16}, [b""] * count)


def send_bad_messages(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of malformed, foreign and truncated messages, judged by the number of answers."""
    rogue = site.rogue(**BUDGET_SETTINGS)
    state = rogue.sites[site.client].site.state
    answered, sent = list[str](), 0
    if _read_status(rogue, site.client, write_good_message(site, rogue)) != "ok":
        raise InapplicableAttack(f"the site rejects valid messages: {rogue.refused[-1]}")
    before = _list_files(state)
    for message in write_bad_messages(site, rogue):
        sent += 1
        if _read_status(rogue, site.client, message) == "ok":
            answered.append(message.name)
    wrong = [*answered, *(f"the file {name}" for name in sorted(_list_files(state) - before))]
    return judge_attack(
        bool(wrong),
        f"{sent} malformed, foreign, truncated and huge messages",
        "a site reads only messages in the agreed-upon format",
        f"answers to {', '.join(wrong)}",
    )


def _read_status(rogue: RogueServer, c: int, message: BadMessage) -> str:
    fields = {**COMMON_FIELDS, **REQUEST_FIELDS.get(message.kind, {})}
    head = {name: BLANK_VALUES[type_] for name, type_ in fields.items()}
    head |= common_head(rogue.sites[c].site.fingerprint, message.kind, 0, c, b"", digest_arrays(message.arrays))
    head |= {k: v for k, v in message.head.items() if k in head or k == "path"}
    head.pop(message.drop, None)
    reply = rogue.sites[c].reply(seal_message(head, message.arrays))
    reply_head, arrays = reply["head"], reply["arrays"]
    assert isinstance(reply_head, ConfigRecord)
    assert isinstance(arrays, ArrayRecord)
    reason = str(reply_head["reason"])
    if reply_head["status"] == "ok" or arrays:
        return "ok"
    rogue.refused.append(reason)
    is_sentence = reason.isprintable() and not direction_in(reason) and "Traceback" not in reason
    return "refused" if is_sentence else "ok"


def _list_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def send_huge_message(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of sending a message with more bytes than the site reads."""
    limit = min(site.site.message_limit, 4 << 20)
    rogue = site.rogue(message_limit=limit)
    message = BadMessage("huge", "train" if site.site.secure is None else "masked", {"round": 1}, [bytes(limit + 1)])
    return judge_attack(
        _read_status(rogue, site.client, message) == "ok",
        "one byte more than message_limit",
        f"a site reads at most {site.site.message_limit >> 20} MiB of one message (message_limit)",
        "the site read it",
    )


def ask_many_models(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of requests for answers to many models in one round."""
    rogue = site.rogue()
    answered = sum(ask_upload(site, rogue, 1, rogue.download(0.01 * k)) > 0 for k in range(TRIED_MODEL_COUNT))
    return judge_attack(
        answered > MAX_ROUND_MODELS,
        f"{TRIED_MODEL_COUNT} models in one round",
        f"a site answers requests for at most {site.site.models_per_round} models per round (models_per_round)",
        f"{answered} answers to models that the server chose",
        f"{answered} answers",
    )


def trigger_alarms(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of repeated and rejected messages, about which the site should raise an alarm."""
    rogue, c = site.rogue(), site.client
    client = rogue.sites[c]
    for kind in ("hello", "train" if site.site.secure is None else "keys"):
        for _ in range(8):
            rogue.exchange(c, kind, round=1)
    for t in range(4):
        rogue.exchange(c, "score", round=10**6 + t)
    status = site_status(client.site)
    tried = f"{status['repeated']} repeated and {status['refused']} rejected messages"
    if status["alarms"]:
        return AttackOutcome(
            "stopped", tried, "nothing", f"{len(status['alarms'])} alarms in the site's log and status"
        )
    return AttackOutcome("OPEN", tried, "the site raises no alarm", "the site raises an alarm")


def overdraw_epsilon(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of requests that exceed the site's epsilon: every round twice, with different models."""
    copy = site.copy()
    trainer = copy.trainer
    noise = get_site_noise(deployed_setting(trainer.experiment.methods[0].setting, site.site.survivors))
    limit = site.site.epsilon
    if noise is None and limit is None:
        raise InapplicableAttack("the agreement contains neither noise (delta) nor a limit on epsilon")
    rogue, releases, rounds = site.rogue(copy), 0, min(trainer.rounds, 20)
    for t in [*range(1, rounds + 1), *range(1, rounds + 1)]:
        releases += ask_upload(site, rogue, t, rogue.download(1e-3 * releases)) > 0
    spent = 0.0 if noise is None else epsilon(noise, releases) if releases else 0.0
    most = limit if limit is not None else epsilon(noise, trainer.rounds) if noise is not None else 0.0
    tried = f"{2 * rounds} releases, two for each round, with different models"
    is_open = spent > most * (1 + 1e-9) or (noise is None and releases > 0)
    budget = "epsilon in site.toml" if limit is not None else "epsilon of the agreed rounds"
    return judge_attack(
        is_open,
        tried,
        f"the ledger stops at {most:.3g} ({budget})",
        f"{releases} releases, epsilon {spent:.3g}",
        f"{releases} releases, epsilon {spent:.3g}",
    )


def ask_small_groups(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of requesting statistics of small groups of patients."""
    groups = SiteGroups(site.copy().trainer)
    if not groups.sums.groups:
        raise InapplicableAttack("the experiment publishes no groups")
    counts = {name: int(rows.sum()) for name, rows in groups.members.items()}
    small = {name: count for name, count in counts.items() if 0 < count < MIN_GROUP_ROWS}
    return judge_attack(
        bool(small),
        f"figures of {len(groups.sums.groups)} groups",
        f"a site publishes a group of {MIN_GROUP_ROWS} or more rows of each class (min_rows)",
        f"figures of {len(small)} groups with fewer than {MIN_GROUP_ROWS} rows, the smallest with "
        f"{min(small.values(), default=0)}",
        f"figures of {len(counts)} groups",
    )


def ask_small_cells(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of analysis questions about cells with few patients at this site."""
    trainer = site.copy().trainer
    agreed = SiteAnalyses(trainer, site.folder).agreed
    if not agreed:
        raise InapplicableAttack("the experiment has no analysis that is computed from sums")
    rows, small = client_rows(trainer.fed, site.client), list[str]()
    for name, one in agreed.items():
        rules = one.rules.with_(min_subjects=max(DEFAULT_MIN_SUBJECTS, one.rules.min_subjects))
        usual = replace(one, analysis=one.analysis.with_(rules=rules))
        cells = (one.publish(rows) & ~usual.publish(rows)).bit_count() if one.flags else 0
        cells += one.rules.min_subjects <= rows.count < DEFAULT_MIN_SUBJECTS
        small += [f"{cells} of {name}"] if cells else []
    return judge_attack(
        bool(small),
        f"cells of {', '.join(agreed)} with few patients of this site",
        f"a site answers 0 for cells with fewer than {DEFAULT_MIN_SUBJECTS} patients (rules, min_subjects)",
        f"cells with fewer than {DEFAULT_MIN_SUBJECTS} patients: {', '.join(small)}",
    )


def ask_crafted_questions(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of crafted questions of analyses, agreed or not, to two copies that differ in one sample."""
    twins = [site.copy(), site.copy(change_first_sample(site))]
    transcripts = [[*_ask_questions(site, site.rogue(twin))] for twin in twins]
    answered = sum(length > 0 for _, length in transcripts[0])
    differing = sum(one != other for one, other in zip(*transcripts, strict=True))
    return judge_attack(
        differing > 0,
        f"{len(transcripts[0])} crafted questions of agreed and other analyses",
        "a site answers only the agreed questions, each once, and its rejections depend only on the message",
        f"{differing} answers distinguish two samples",
        f"{answered} answers" + ("" if site.site.secure is None else ", each a masked vector"),
    )


def _ask_questions(site: RehearsedSite, rogue: RogueServer) -> Iterator[tuple[str, int]]:
    """Yield the reason and the length of the answer to each crafted question."""
    agreed = SiteAnalyses(rogue.trainer, site.folder).agreed
    for name in dict.fromkeys([*agreed, "not-agreed", "uploads", "os:system"]):
        contents = [b"", b"{}", bytes(64), b"[" * 4096]
        if name in agreed:
            one = agreed[name]
            terms = one.terms(rogue.terms(1, question=AnalysisStep.create(name, 0, b"")))
            question = one.analysis.question(one.analysis.start(terms))
            assert question is not None
            for scale in (1.0, 1e9, -1e300, 0.0):
                values = {key: value * scale + (1 - scale) for key, value in question.values.items()}
                contents.append(Question(question.name, values).encode())
            contents += [question.encode(), Question("unknown", question.values).encode()]
        for k, content in enumerate([*contents, *contents[-2:]]):
            step = AnalysisStep.create(name, max(0, k - len(contents)), content)
            yield _ask_analysis(site, rogue, step)


def _ask_analysis(site: RehearsedSite, rogue: RogueServer, step: AnalysisStep) -> tuple[str, int]:
    """Return the reason and the length of the answer to one question of an analysis."""
    before, c, terms = len(rogue.refused), site.client, rogue.terms(1, question=step)
    if site.site.secure is None:
        length = len(rogue.ask(c, "analysis", terms.encode(), round=1) or b"")
    else:
        session = rogue.begin(1)
        session.vector(c, terms, None)
        length = len(session.vectors.get(c, b""))
    return "; ".join(rogue.refused[before:]), length


def read_disguised_names(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of a table with a column name that changes the direction of text."""
    path, data = _write_table(site)
    path.write_text(f"{BIDI_NAME},label\n1,0\n2,1\n", encoding="utf-8")
    reason = _read_table(site, data)
    return judge_attack(
        not reason,
        "a table with a column whose name contains U+202E",
        "names with characters that change the direction of text are rejected",
        "the site accepts a name that looks like a different name",
        "a refusal",
    )


def read_oversized_table(site: RehearsedSite) -> AttackOutcome:
    """Return the outcome of a small file that expands to a huge table."""
    path, data = _write_table(site, ".csv.gz")
    block = b"1,0\n" * (1 << 18)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"age,label\n")
        for _ in range(BOMB_BYTES // len(block)):
            file.write(block)
    reason = _read_table(site, data)
    path.unlink()
    return judge_attack(
        not reason,
        f"a compressed table of {BOMB_BYTES >> 30} GiB in a few MB",
        "the unpacked size and time are bounded",
        "the site reads it",
        "a refusal",
    )


def _write_table(site: RehearsedSite, suffix: str = ".csv") -> tuple[Path, dict[str, Any]]:
    """Return the path of a crafted table, and a data source for a site that refers to this path."""
    source = dict(site.site.data)
    key = "path" if "path" in source else "source"
    if site.site.samples.table is None or not Path(str(source[key])).suffix:
        raise InapplicableAttack("the site's data are not stored as a table in a file")
    path = site.folder / f"crafted{suffix}"
    return path, source | {key: str(path)}


def _read_table(site: RehearsedSite, data: Mapping[str, Any]) -> str:
    """Return the reason why the site does not read a table. The reason is empty if the site reads the table."""
    trainer = site.copy().trainer
    try:
        read_data(trainer.experiment, site.site.with_(data=dict(data)))
    except FedloomError as error:
        return describe_error(error)
    return ""


MESSAGE_ATTACKS: Sequence[tuple[str, Any]] = (
    ("many models in a round", ask_many_models),
    ("beyond epsilon", overdraw_epsilon),
    ("small groups", ask_small_groups),
    ("small cells of analyses", ask_small_cells),
    ("crafted questions of analyses", ask_crafted_questions),
    ("malformed messages", send_bad_messages),
    ("oversized message", send_huge_message),
    ("repeated and rejected messages", trigger_alarms),
    ("disguised names in a table", read_disguised_names),
    ("oversized table", read_oversized_table),
)
