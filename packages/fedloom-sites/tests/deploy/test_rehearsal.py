"""Rehearsals: the red team finds what is planted, and nothing at a site whose settings and code are whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom.analyses.importance import PooledImportance
from fedloom.lab.cli import app
from fedloom_sites.deploy import alarms
from fedloom_sites.deploy.alarms import ALARM_ENTRY, MAX_REFUSALS, MAX_REPEATS, MAX_SESSIONS, Alarms, site_status
from fedloom_sites.deploy.audit import SENT_FILE, read_entries, verify_log
from fedloom_sites.deploy.rehearsal import copies, messages, samples, sums
from fedloom_sites.deploy.rehearsal.copies import RehearsedSite
from fedloom_sites.deploy.rehearsal.outcomes import AttackOutcome
from fedloom_sites.deploy.rehearsal.rehearse import REHEARSED_ATTACKS, rehearse_attacks
from fedloom_sites.deploy.secure import member
from fedloom_sites.deploy.secure import site as secure_site
from fedloom_sites.deploy.secure.changes import CohortChanges
from fedloom_sites.deploy.secure.opened import OpenedSums
from fedloom_sites.deploy.setting_files import settings_text
from fedloom_sites.deploy.settings import Site
from fedloom_sites.deploy.site.asked import AskedModels
from fedloom_sites.deploy.site.client import Client
from fedloom_sites.deploy.site.ledger import Ledger
from fedloom_sites.deploy.site.trainer import Trainer
from tests.deploy.scene import Scene, scene
from tests.deploy.sessions import secured

pytestmark = pytest.mark.attack("a rehearsal")

FEW: dict[str, Any] = {
    "partition": {"kind": "dirichlet", "clients": 4, "alpha": 0.5, "max_train_per_client": 24},
    "rounds": 2,
}
WEIGHED: dict[str, Any] = {"client_weights": "samples", "aggregation_weights": {"kind": "samples"}}
NOISE = {"upload_transform": {"kind": "gaussian-noise", "clip": 1.0, "sigma": 3.0, "delta": 1e-5}}
MLP = {"model": {"kind": "mlp", "hidden": [40]}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    monkeypatch.setattr(samples, "QUESTION_COUNT", 12)
    monkeypatch.setattr(messages, "BOMB_BYTES", 1 << 28)


def rehearsed(here: Scene, **settings: Any) -> RehearsedSite:
    """A copy of a site, in a folder."""
    return RehearsedSite(here.sites[1].with_(**settings), Path(mkdtemp(dir=here.folder)))


def masked(folder: Path, **agreed: Any) -> Scene:
    return secured(folder, "fedavg", 3, agreed=agreed, **FEW, **WEIGHED)


def test_a_site_that_is_whole_has_no_open_row_and_is_not_changed(tmp_path: Path) -> None:
    here = masked(tmp_path)
    site = here.sites[1]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    rows = {row.attack: row.outcome for row in rehearse_attacks(site)}
    assert [*rows] == [name for name, _ in REHEARSED_ATTACKS]
    assert {name for name, outcome in rows.items() if outcome.verdict == "OPEN"} == set()
    stopped = {name for name, outcome in rows.items() if outcome.verdict == "stopped"}
    assert stopped >= {name for name, _ in sums.SUM_ATTACKS} - {"honest round (control)", "neighboring sums"}
    assert "the sum of 4 sites" in rows["honest round (control)"].learned
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


WEAKENED: dict[str, tuple[Callable[[RehearsedSite], AttackOutcome], dict[str, Any], dict[str, Any]]] = {
    "max_share": (sums.dominate_sum, {"max_share": 1.0}, {}),
    "changes": (sums.compare_neighbors, {"changes": 10**6, "steady": 0}, {}),
    "steady": (sums.leave_one_by_one, {"steady": 0}, {}),
    "models": (messages.ask_many_models, {}, {"models_per_round": 100, "models_in_run": 100}),
}


@pytest.mark.parametrize("name", WEAKENED)
def test_a_weakened_setting_turns_its_row_red(name: str, tmp_path: Path) -> None:
    attack, agreed, settings = WEAKENED[name]
    assert attack(rehearsed(masked(tmp_path / "whole"))).verdict != "OPEN"
    assert attack(rehearsed(masked(tmp_path / "weak", **agreed), **settings)).verdict == "OPEN"


def test_without_masks_the_server_reads_the_upload_and_samples(tmp_path: Path) -> None:
    site = rehearsed(scene(tmp_path / "plain", "fedavg", **FEW, **MLP))
    assert samples.read_single_upload(site).verdict == "OPEN"
    bins = samples.read_by_bins(site)
    assert bins.verdict == "OPEN"
    assert int(bins.learned.split()[0]) > 0
    noisy = rehearsed(scene(tmp_path / "noisy", "fedavg", **FEW, **MLP, **NOISE))
    assert samples.read_single_upload(noisy).verdict == "remains"
    assert samples.read_by_bins(noisy).verdict == "stopped"
    assert samples.compare_twins(noisy).verdict == "stopped"
    assert messages.overdraw_epsilon(noisy).verdict == "stopped"


def test_noise_that_is_accounted_for_may_be_in_any_sums(tmp_path: Path) -> None:
    """Sums with noise are of any sites: a difference shows what epsilon counts, so the row is not red."""
    noise = {"aggregator": {"kind": "private-mean", "clip": 1.0, "sigma": 3.0, "delta": 1e-5}}
    site = rehearsed(secured(tmp_path, "fedavg", 3, **FEW, **noise))
    for attack in (sums.leave_one_by_one, sums.compare_neighbors):
        outcome = attack(site)
        assert (outcome.verdict, outcome.rule) == ("remains", "epsilon accounts for each round")


def test_groups_of_few_rows_turn_their_row_red(tmp_path: Path) -> None:
    cells = "".join(f"{k % 7},{k % 5},{'ab'[k % 30 < 2]},{k % 2}\n" for k in range(600))
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "all.csv").write_text("a,b,g,y\n" + cells)
    data = {"source": "csv", "path": str(tmp_path / "all.csv"), "categorical": ["g"], "target": "y"}
    cut = {"partition": {"kind": "iid", "clients": 3, "test": 0.5}}
    found = {}
    for least in (2, 10):
        given = {"data": data, "analysis": [{"kind": "groups", "by": ["g"], "min_rows": least}], **cut}
        found[least] = messages.ask_small_groups(rehearsed(scene(tmp_path / str(least), "fedavg", **given))).verdict
    assert found == {2: "OPEN", 10: "stopped"}


def _ignore(*_: Any, **__: Any) -> None:
    """A protection that is gone."""


GONE: dict[str, tuple[Callable[[RehearsedSite], AttackOutcome], list[tuple[Any, str, Any]]]] = {
    "sums of few sites": (
        sums.isolate_by_empty_sites,
        [
            *((module, "check_summands", _ignore) for module in (secure_site, member, copies)),
            (member.counters, "check_enough", _ignore),  # a second protection of the same sums
        ],
    ),
    "sums on the same model": (sums.repeat_model, [(OpenedSums, "_find_same_models", lambda *_: ())]),
    "memory over experiments": (
        sums.repeat_session_start,
        [(OpenedSums, "_find_same_models", lambda *_: ()), (CohortChanges, "exhausted", lambda *_: [])],
    ),
    "one list of a session": (
        sums.isolate_by_drop_outs,
        [
            (member.SessionMember, "_check_arrived", lambda _self, _record, clients: [*clients]),
            (member.secure, "check_statement", _ignore),
            (member.counters, "check_enough", _ignore),
        ],
    ),
    "budget of models": (messages.ask_many_models, [(AskedModels, "enter_masked", _ignore)]),
    "alarms": (messages.trigger_alarms, [(Alarms, "note", lambda *_: [])]),
    "checks of a message": (messages.send_bad_messages, [(Client, "_check", _ignore)]),
}


@pytest.mark.parametrize("name", GONE)
def test_a_protection_that_is_gone_turns_its_row_red(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack, patches = GONE[name]
    for where, what, instead in patches:
        monkeypatch.setattr(where, what, instead)
    assert attack(rehearsed(masked(tmp_path))).verdict == "OPEN"


def test_a_refusal_that_depends_on_a_sample_turns_its_row_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(trainer: Trainer, *_: Any, **__: Any) -> Any:
        raise secure_site.ProtocolBroken(
            f"the largest value is {float(trainer.fed.data.x.max())} of {trainer.samples[:8]}"
        )

    here = masked(tmp_path)
    assert samples.compare_twins(rehearsed(here)).verdict == "stopped"
    monkeypatch.setattr(Trainer, "attach_local_data", leaking)
    assert samples.compare_twins(rehearsed(here)).verdict == "stopped"  # the sentence stays at the site
    monkeypatch.setattr(Trainer, "log_privately", lambda _self, reason: reason)
    assert samples.compare_twins(rehearsed(here)).verdict == "OPEN"


def test_a_ledger_that_counts_nothing_turns_its_row_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = rehearsed(scene(tmp_path, "fedavg", **FEW, **NOISE), epsilon=1.0)
    assert messages.overdraw_epsilon(site).verdict == "stopped"
    monkeypatch.setattr(Ledger, "release", lambda *_, **__: 1)
    assert messages.overdraw_epsilon(site).verdict == "OPEN"


def test_an_attack_that_fails_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: RehearsedSite) -> AttackOutcome:
        raise ZeroDivisionError("a bug")

    monkeypatch.setitem(rehearse_attacks.__globals__, "REHEARSED_ATTACKS", [("broken", failing)])
    [row] = rehearse_attacks(masked(tmp_path).sites[0])
    assert row.outcome.verdict == "OPEN"
    assert "a bug" in row.outcome.rule


def test_the_command(ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 and the names of open rows; 0 without any. `--json` has all columns."""
    folder = ready / "sites" / "site-1"
    tried = [("single upload", samples.read_single_upload)]
    monkeypatch.setitem(rehearse_attacks.__globals__, "REHEARSED_ATTACKS", tried)
    result = CliRunner().invoke(app, ["deploy", "rehearse", str(folder), "--json"])
    assert result.exit_code == 1, result.output
    shown = json.loads(result.stdout)
    assert shown["open"] == ["single upload"]
    assert {*shown["attacks"][0]} == {"attack", "verdict", "tried", "learned", "rule"}
    assert "1 of 1 attacks are OPEN: single upload" in result.stderr
    monkeypatch.setattr(samples, "describe_protection", lambda _: "noise")
    result = CliRunner().invoke(app, ["deploy", "rehearse", str(folder)])
    assert result.exit_code == 0, result.output
    assert "single upload" in result.stdout
    assert "remains" in result.stdout


# ---------------------------------------------------------------------------------------------------------- alarms


def asked(site: Site) -> Any:
    """A server and the site itself."""
    return RehearsedSite(site, site.state.parent / "unused").rogue


def test_refused_and_repeated_messages_raise_alarms_that_grow_rarer(tmp_path: Path) -> None:
    """At the third refusal, then at the sixth, the twelfth ... ; a new process of the site counts on."""
    site = masked(tmp_path).sites[0]
    rogue = lambda: copies.RogueServer([Client(site)] * 4, Client(site).trainer)  # noqa: E731
    for k in range(4 * (MAX_REFUSALS + 1)):
        rogue().exchange(0, "score", round=10**6 + k)
    log = site.folder / SENT_FILE
    raised = [line["reason"] for line in read_entries(log) if line["what"] == ALARM_ENTRY]
    assert [text.partition(" of the")[0] for text in raised] == [f"ALARM: this site rejected {n}" for n in (3, 6, 12)]
    for _ in range(MAX_REPEATS + 1):
        rogue().exchange(0, "keys", round=1, session=b"1" * 16)
    status = site_status(site)
    assert (status["refused"], status["repeated"]) == (12, MAX_REPEATS)
    assert status["alarms"][-1]["reason"].startswith(
        f"ALARM: the server has sent the same message {MAX_REPEATS + 1} times"
    )
    verify_log(log)


@pytest.mark.parametrize(
    ("rules", "noise", "questions"),
    [({"questions": 40}, {}, 40), ({}, {}, PooledImportance().most_questions), ({"questions": 40}, NOISE, 0)],
    ids=["agreed", "as usual", "noise"],
)
def test_the_agreed_questions_of_analyses_raise_no_alarm(
    rules: dict[str, int], noise: dict[str, Any], questions: int, tmp_path: Path
) -> None:
    """Only in the last round, in which the analyses are, and only at a site that answers them."""
    analysis = {"kind": "pooled-importance", "rules": {"min_subjects": 2, **rules}}
    site = secured(tmp_path, "fedavg", 3, **FEW, **WEIGHED, **noise, analysis=[analysis]).sites[0]
    for t, most in ((1, MAX_SESSIONS), (2, MAX_SESSIONS + questions), (3, MAX_SESSIONS)):
        watch = Client(site)._alarms
        line = {"what": "sent", "kind": "keys", "round": t, "status": "ok"}
        raised = [watch.note({**line, "asked": f"{t}-{k}"}, "") for k in range(most + 1)]
        assert not any(raised[:-1])
        assert [text.partition(". ")[0] for text in raised[-1]] == [
            f"ALARM: the server has started {most + 1} sessions for round {t}"
        ]


def test_an_honest_run_raises_no_alarm(tmp_path: Path) -> None:
    here = secured(tmp_path, "fedavg", **FEW)
    here.serve()
    for site in here.sites:
        assert site_status(site)["messages"] > 10
        assert not site_status(site)["alarms"]


def test_an_alarm_says_nothing_to_the_server_and_shows_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = masked(tmp_path).sites[0]
    rogue = copies.RogueServer([Client(site)] * 4, Client(site).trainer)
    reasons = [str(rogue.exchange(0, "keys", release="\x1b[2J\u202e")[0]["reason"]) for _ in range(5)]
    assert len({*reasons}) == 1
    shown = capsys.readouterr().err
    assert "ALARM" in shown
    assert not {"\x1b", "\u202e"} & {*shown, *reasons[0]}


def test_the_status_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = masked(tmp_path).sites[0]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "site.toml").write_text(settings_text(site))
    rogue = copies.RogueServer([Client(site)] * 4, Client(site).trainer)
    for k in range(3):
        rogue.exchange(0, "score", round=10**6 + k)
    result = CliRunner().invoke(app, ["deploy", "status", str(folder)])
    assert result.exit_code == 0, result.output
    assert "refused: 3" in result.stdout
    assert "ALARM: this site rejected 3 of the server's messages" in result.stdout
    assert json.loads(CliRunner().invoke(app, ["deploy", "status", str(folder), "--json"]).stdout)["refused"] == 3
    shutil.rmtree(site.folder)
    assert "last: never\nno alarm" in CliRunner().invoke(app, ["deploy", "status", str(folder)]).stdout
    assert alarms.MAX_SESSIONS > MAX_REPEATS
