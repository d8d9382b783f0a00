"""The model card of a run: what it holds, and that recorded text stays text."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from recorded import Recording
from typer.testing import CliRunner

from fedloom.lab.cli import app


def test_the_command_writes_a_card_with_the_sites_of_the_leading_method(tmp_path: Path) -> None:
    run = Recording(methods=4, seeds=5, clients=6, rounds=10, task="binary", classes=2).write(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "r.html"), "--card"])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "r" / "card.md").read_text()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert [line[0] for line in lines[2:]] == [*(f"site {k}" for k in range(6)), "Mean over clients"]
    assert lines[3][lines[0].index("AUROC")] == "\N{EN DASH}"  # a client without a test part
    method, model = text.split("- Method: ")[1].split("\n")[0].split(" (")[0], text.split("), ")[1].split(" model")[0]
    table = pq.read_table(run / "metrics.parquet")
    for name, value in (("method", method), ("model", model), ("part", "test"), ("metric", "auroc"), ("round", 10),
                        ("client", 2)):  # fmt: skip
        table = table.filter(pc.equal(table[name], value))
    mean = float(lines[4][lines[0].index("AUROC")].split(" ± ")[0])
    assert mean == pytest.approx(pc.mean(table["value"]).as_py(), abs=0.005)
    assert text.count("To be completed") == 2
    assert "No epsilon was recorded" in text
    assert "fedloom 0.1.0" in text


def test_recorded_text_cannot_become_markup(tmp_path: Path) -> None:
    run = Recording(methods=2, seeds=1, clients=2, rounds=5, name="<b>a|b</b>").write(tmp_path / "run")
    CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "r.html"), "--card"])
    assert "# Model card: \\<b\\>a\\|b\\</b\\>" in (tmp_path / "r" / "card.md").read_text()


def test_a_card_of_a_run_without_its_partition_has_the_means_only(tmp_path: Path) -> None:
    run = Recording(methods=2, seeds=1, clients=2, rounds=5).write(tmp_path / "run")
    (run / "partition.parquet").unlink()
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "r.html"), "--card"])
    assert result.exit_code == 0, result.exception
    rows = [line for line in (tmp_path / "r" / "card.md").read_text().splitlines() if line[:1] == "|"]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["Mean over clients"]


def test_a_card_that_people_filled_in_is_kept(tmp_path: Path) -> None:
    run = Recording(methods=2, seeds=1, clients=2, rounds=5).write(tmp_path / "run")
    command = ["report", str(run), "--out", str(tmp_path / "r.html"), "--card"]
    assert CliRunner().invoke(app, command).exit_code == 0
    (tmp_path / "r" / "card.md").write_text("for the ward only")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "may contain text written by people. Move" in " ".join(result.output.split())
    assert (tmp_path / "r" / "card.md").read_text() == "for the ward only"
