"""What is seen of a deployment while it runs and afterwards: status, metrics, and the report of its results."""

import json
import os
import re
import shutil
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fedloom.engine.privacy import epsilon
from fedloom.errors import ConfigError, RunStopped, Stop
from fedloom.lab.cli import app
from fedloom.lab.report.page import write_report
from fedloom.lab.report.reading import read_runs
from fedloom.rows.channels import GaussianNoise
from fedloom.storage.locks import lock
from fedloom_sites.deploy import apps
from fedloom_sites.deploy.ops import keys
from fedloom_sites.deploy.ops import run as service
from fedloom_sites.deploy.ops.processes import free_port
from fedloom_sites.deploy.ops.status import read_status, status_lines, status_table, summarize_clients
from fedloom_sites.deploy.server import run as deployed
from fedloom_sites.deploy.server.run import finished_hint, serve_run
from fedloom_sites.deploy.setting_files import settings_text
from tests.deploy.scene import FIRST, changed, scene

SMALL = {"rounds": 4, "evaluate": {"every": 2}}


def faulty(here):
    """Site 1 sends too long a difference in round 2, site 2 is mute in round 3."""

    def fault(node, message, reply):
        head = message.content["head"]
        if (head["kind"], head["round"], node) == ("train", 2, FIRST + 1):
            return changed(reply, 1, head={"samples": -1})
        if (head["kind"], head["round"], node) == ("train", 3, FIRST + 2):
            return None
        return reply

    return here.serve(here.grid(fault), quorum=2, patience=0.1)


def test_before_while_and_after(tmp_path):
    here = scene(tmp_path, "fedavg", **SMALL)
    assert read_status(here.server)["state"] == "not started"
    assert not here.server.audit.exists()
    assert faulty(here) is Stop.DONE
    with lock(here.server.checkpoints):  # nothing waits for a server at work
        found = read_status(here.server)
    assert (found["state"], found["rounds"], found["planned"], found["epsilon"]) == ("done", 4, 4, None)
    assert found["round_seconds"]["last"] > 0
    [good, bad, lost] = found["sites"]
    assert [s["accepted"] for s in found["sites"]] == [4, 3, 3]
    assert [s["share"] for s in found["sites"]] == [1.0, 0.75, 0.75]
    assert good["rejected"] == {}
    assert bad["rejected"]["9"]["count"] == 1
    assert "-1 training samples" in bad["rejected"]["9"]["reason"]
    assert lost["missed"] == 1
    sizes = [here.experiment.partition(here.experiment.source.load(), 0).sizes(p)[0] for p in ("train", "test")]
    assert [good["samples"][0], good["samples"][2]] == [int(s) for s in sizes]
    [row] = [r for r in good["scores"] if r["model"] == "global"]
    assert (row["round"], 0 < row["loss"] < 3) == (4, True)
    assert found["disk"]["checkpoints"] > 1000
    assert found["disk"]["audit"] == here.server.audit.stat().st_size


@pytest.mark.parametrize(("step", "said"), [(9, "none accepted"), (None, "never")])
def test_a_site_that_only_sent_what_was_rejected_did_not_never_reply(step, said):
    log = [{"what": "rejected", "client": 0, "round": 1, "step": step, "reason": "too long"}] if step else []
    [found] = summarize_clients(log, {0: "north"}, 1).values()
    [row] = status_table({"sites": [{"site": "north", "share": 0.0, "scores": [], **found}]})
    assert row["last reply"] == said


def test_a_killed_server_and_a_log_that_is_being_written(tmp_path):
    here = scene(tmp_path, "fedavg", **SMALL)
    assert here.serve() is Stop.DONE
    lines = here.server.audit.read_bytes().splitlines(keepends=True)
    here.server.audit.write_bytes(b"".join(lines[:-1]) + lines[-1][:9])
    with lock(here.server.checkpoints):
        assert read_status(here.server)["state"] == "running"
    for number in (2**22 + 1, os.getpid()):  # the second is alive, as another one may be after a reboot
        (here.server.checkpoints / ".lock").write_text(f"{number} {os.uname().nodename}")
        assert read_status(here.server)["state"] == "killed"
    newest = max(here.server.checkpoints.glob("checkpoint-*.json"))
    newest.write_bytes(newest.read_bytes()[:50])
    assert 0 < read_status(here.server)["rounds"] <= 4  # the generation before stands in


def test_a_round_that_was_played_twice_counts_once(tmp_path):
    here = scene(tmp_path, "fedavg", **SMALL)
    assert here.serve() is Stop.DONE
    for path in here.server.checkpoints.glob("checkpoint-*"):
        path.unlink()
    assert here.serve() is Stop.TOO_FEW  # sites do not follow a server that far back
    for folder in [path for site in here.sites for path in site.state.iterdir() if path.is_dir()]:
        shutil.rmtree(folder)
    assert here.serve() is Stop.DONE
    assert [s["accepted"] for s in read_status(here.server)["sites"]] == [4, 4, 4]


def test_privacy_spent_is_that_of_the_accountant(tmp_path):
    channel = {"kind": "gaussian-noise", "clip": 1.0, "sigma": 2.0, "delta": 1e-5}
    here = scene(tmp_path, "fedavg", **{**SMALL, "rounds": 3, "upload_transform": channel})
    assert here.serve() is Stop.DONE
    noise = GaussianNoise(**{k: v for k, v in channel.items() if k != "kind"}, accountant="rdp")
    assert read_status(here.server)["epsilon"] == pytest.approx(epsilon(noise, 3))
    [run] = read_runs([here.server.results])
    [spent] = [points for key, points in run.totals.items() if key.metric == "epsilon"]
    assert spent.value.tolist() == pytest.approx([epsilon(noise, t) for t in (0, 2, 3)])
    page = write_report([here.server.results], tmp_path / "page.html", charts=False).read_text()
    section = page[page.index('<section id="privacy"') :]
    section = section[: section.index("</section>")]
    assert "other-1-epsilon" in section  # the chart
    lines = re.findall(r'<tr>\s*<th scope="row">(\d+)</th>\s*<td>([^<]+)</td>\s*</tr>', section)
    assert [int(t) for t, _ in lines] == [0, 2, 3]
    assert [float(e) for _, e in lines] == pytest.approx([epsilon(noise, t) for t in (0, 2, 3)], rel=1e-3)


WILD = {"rounds": 5, "evaluate": {"every": 1}, "local": {"lr": 300.0, "epochs": 1, "batch_size": 200}}


def test_a_run_that_diverges_says_so_as_a_simulation_does(tmp_path):
    """It is told when it happens; the run goes on to its end, and its figures stay."""
    here, told = scene(tmp_path, "fedavg", **WILD), []

    def look(node, message, reply):
        if message.content["head"]["round"] == 5:
            found = read_status(here.server)
            told.append((found["state"], found["reason"]))
        return reply

    assert here.serve(here.grid(look)) is Stop.DIVERGED
    known = here.simulate()
    assert known.stop is Stop.DIVERGED
    [line] = here.audit("diverges")
    sentence = line["reason"]
    assert known.detail.split(":")[0] == f"round {known.diverged}"
    assert told[0] == ("running", f"diverges: {sentence}")
    found, [run] = read_status(here.server), here.summary()["runs"]
    assert (found["state"], found["rounds"]) == ("diverged", 5)
    assert found["reason"].endswith(f"({sentence})")
    assert (run["status"], run["diverged"], run["rounds"]) == ("diverged", known.diverged, 5)
    assert sentence in run["reason"]
    [read] = read_runs([here.server.results])
    assert not read.summary.runs[0].lost
    seen = len(told)
    assert here.serve(here.grid(look)) is Stop.DIVERGED  # nothing is asked again
    assert (len(told), len(here.audit("diverges"))) == (seen, 1)


def test_a_diverging_run_that_goes_on_after_a_stop_says_it_once(tmp_path):
    here = scene(tmp_path, "fedavg", **{**WILD, "rounds": 6})

    def fault(node, message, reply):
        return None if message.content["head"]["round"] == 5 and message.content["head"]["kind"] == "train" else reply

    assert here.serve(here.grid(fault)) is Stop.TOO_FEW
    assert here.serve() is Stop.DIVERGED
    assert len(here.audit("diverges")) == 1
    assert here.summary()["runs"][0]["diverged"] == here.simulate().diverged


@pytest.mark.attack("forged replies")
@pytest.mark.parametrize("loss", [200.0, 1e30, 1e308, -1e308])
@pytest.mark.parametrize("since", [0, 2])
def test_one_site_makes_no_run_diverged(loss, since, tmp_path):
    """It claims any loss in every evaluation, the first included or not; the others' losses decide."""
    here = scene(tmp_path, "fedavg", rounds=6, evaluate={"every": 1})

    def claim(node, message, reply):
        metrics = {key: loss if key.endswith("/loss") else value for key, value in reply.content["metrics"].items()}
        return changed(reply, 1, metrics=metrics)

    def fault(node, message, reply):
        lies = node == FIRST + 1 and "metrics" in reply.content and message.content["head"]["round"] >= since
        return claim(node, message, reply) if lies else reply

    assert here.serve(here.grid(fault)) is Stop.DONE
    assert not here.audit("diverges")
    assert here.summary()["runs"][0]["status"] == "done"


def test_the_command(tmp_path):
    here = scene(tmp_path, "fedavg", **SMALL)
    assert here.serve() is Stop.DONE
    (tmp_path / "server.toml").write_text(settings_text(here.server))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    shown = CliRunner().invoke(app, ["deploy", "status", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}  # nothing is written
    assert "rounds: 4 of 4" in shown.output
    assert "site-2" in shown.output
    found = json.loads(CliRunner().invoke(app, ["deploy", "status", str(tmp_path), "--json"]).output)
    assert found == json.loads(json.dumps(read_status(here.server))) | {"disk": found["disk"]}
    missing = CliRunner().invoke(app, ["deploy", "status", str(tmp_path / "nothing")])
    assert (missing.exit_code, "nothing does not exist. Pass" in missing.output) == (2, True)


def test_metrics_are_served_while_it_runs_and_not_after(tmp_path):
    port = free_port()
    here, seen = scene(tmp_path, "fedavg", **SMALL), []

    def fault(node, message, reply):
        if message.content["head"]["round"] == 3:
            seen.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=600).read().decode())
        return reply

    assert here.serve(here.grid(fault), metrics_port=port) is Stop.DONE
    assert "fedloom_rounds_done 2.0" in seen[0]
    assert 'fedloom_site_rounds_accepted{site="site-1"} 2.0' in seen[0]
    assert 'fedloom_site_loss{model="global",site="site-0"}' in seen[-1]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=600)


def test_no_port_serves_nothing_and_a_taken_one_is_refused(tmp_path, monkeypatch):
    here = scene(tmp_path, "fedavg", **SMALL)
    monkeypatch.setattr("prometheus_client.start_http_server", lambda *_: pytest.fail("a port was opened"))
    assert here.serve() is Stop.DONE
    monkeypatch.undo()
    import socket

    other = scene(tmp_path / "other", "fedavg", **SMALL)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="metrics_port"):
        deployed.serve_run(other.grid(), other.server.with_(metrics_port=taken.getsockname()[1]), lambda _: None)


def test_the_report_reads_results_as_a_run(tmp_path: Path):
    here = scene(tmp_path, "flame", **SMALL)
    assert faulty(here) is Stop.DONE
    [run] = read_runs([here.server.results])
    assert run.names == ["site-0", "site-1", "site-2"]
    assert [(r.method, r.status, r.rounds) for r in run.summary.runs] == [("flame", "done", 4)]
    assert run.partitions[0].counts.shape == (3, 0)
    assert [len(points.round) for points in run.seconds.values()] == [4]
    table = {r["site"]: r for r in read_status(here.server)["sites"]}
    assert {name: site.accepted for name, site in run.summary.sites.items()} == {
        n: r["accepted"] for n, r in table.items()
    }
    page = write_report([here.server.results], tmp_path / "page.html").read_text()
    assert 'id="sites"' in page
    assert "-1 training samples, " in page
    own = torch.tensor([r["loss"] for r in table["site-0"]["scores"]])
    assert bool(own.isfinite().all())


def test_the_report_of_a_run_that_is_under_way_or_stopped(tmp_path):
    here = scene(tmp_path, "fedavg", **SMALL)

    def fault(node, message, reply):
        return None if message.content["head"]["round"] == 4 and node == FIRST else reply

    assert here.serve(here.grid(fault)) is Stop.TOO_FEW
    [run] = read_runs([here.server.results])
    assert [(r.status, r.rounds) for r in run.summary.runs] == [("interrupted", 3)]
    assert run.summary.sites["site-0"].missed == 1


def test_the_node_of_every_site_stands_beside_its_name(tmp_path):
    here = scene(tmp_path, "fedavg", **SMALL)
    assert here.serve() is Stop.DONE
    assert [row["node"] for row in status_table(read_status(here.server))] == [str(FIRST + c) for c in range(3)]


@pytest.mark.parametrize(("days", "words"), [(29, "expires on"), (31, None), (-1, "expired on")])
def test_a_certificate_that_ends_soon_is_reported(days, words, tmp_path):
    here = scene(tmp_path, "fedavg", **SMALL)
    ca = keys.make_authority("try", 400)
    then = datetime.now(UTC) - timedelta(days=100)
    made = keys.issue_server_certificate(ca, ["localhost"], 100 + days, then)
    for name, content in (("ca.crt", ca.pem()), ("server.crt", made.certificate)):
        (tmp_path / name).write_bytes(content)
    server = here.server.with_(ca=tmp_path / "ca.crt", certificate=tmp_path / "server.crt")
    found = [line for line in status_lines(read_status(server)) if "certificate" in line]
    assert len(found) == (words is not None)
    assert all(f"the server's certificate {words}" in line and "restart the superlink's unit" in line for line in found)


def test_a_failed_run_is_called_failed_at_every_further_start(tmp_path, monkeypatch, capsys):
    """It is no success, neither for systemd, which does not start it again, nor in Flower's list of runs."""
    here = scene(tmp_path, "fedavg", **SMALL | {"local": {"lr": 1e-30, "epochs": 1, "batch_size": 200}})
    assert here.serve() is Stop.UNCHANGED
    said = []
    assert serve_run(here.grid(), here.server, said.append) is Stop.UNCHANGED
    file = tmp_path / "server.toml"
    file.write_text(settings_text(here.server))
    assert service.main([str(file), "flwr", "run"]) == service.FINAL_EXIT_CODE
    monkeypatch.setenv(service.RESTART_VARIABLE, "1")
    assert service.main([str(file), "flwr", "run"]) == 0  # containers restart after every other code
    for text in (*said, capsys.readouterr().out):
        assert {*text.splitlines()} == {f"fedloom: {finished_hint(Stop.UNCHANGED)}"}
        assert "the run has ended: nothing was trained" in text
    with pytest.raises(RunStopped, match=Stop.UNCHANGED.value):
        apps.server_app(here.grid(), SimpleNamespace(run_config={"server": str(file)}))


def test_the_service_runs_until_all_rounds_are_done(tmp_path, monkeypatch):
    """It asks to be started again after an end that can be resumed, and starts nothing once all is done."""
    here = scene(tmp_path, "fedavg", **SMALL)
    (tmp_path / "server.toml").write_text(settings_text(here.server))
    ran = []
    monkeypatch.setattr(service.subprocess, "run", lambda words, **_: ran.append(words))
    assert service.main([str(tmp_path / "server.toml"), "flwr", "run"]) == 1
    assert here.serve() is Stop.DONE
    assert service.main([str(tmp_path / "server.toml"), "flwr", "run"]) == 0
    assert ran == [["flwr", "run"]]


@pytest.mark.parametrize("stop", Stop)
def test_the_service_starts_again_only_after_ends_that_a_start_can_change(stop, tmp_path, monkeypatch):
    """A run of which a person must remove a reason does not start every minute, and no failure looks like a success."""
    here = scene(tmp_path, "fedavg", **SMALL | {"rounds": 1})
    (tmp_path / "server.toml").write_text(settings_text(here.server))
    assert here.serve() is Stop.DONE
    path = here.server.results / "summary.json"
    ended = path.read_text()
    path.unlink()

    def ends(_words, **_):
        path.write_text(ended.replace('"DONE"', f'"{stop.name}"'))

    monkeypatch.setattr(service.subprocess, "run", ends)
    monkeypatch.setattr(service, "finished_reason", lambda _: None if stop.is_resumable or not path.exists() else stop)
    code = service.main([str(tmp_path / "server.toml"), "flwr", "run"])
    again = {Stop.TOO_FEW, Stop.INTERRUPTED}
    assert code == (0 if stop.status == "done" else 1 if stop in again else service.FINAL_EXIT_CODE)
