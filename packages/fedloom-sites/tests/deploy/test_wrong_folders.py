"""Every command of `fedloom deploy` on a folder that is not meant: it says what the folder is, and what helps there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fedloom.lab.cli import app
from fedloom_sites.cli.deploy import deploy
from fedloom_sites.deploy.setting_files import describe_folder

WHOLE, SERVER, SITE = "a deployment's directory", "a server's folder", "a site's folder"
OTHERS = ("an empty folder", "no folder", "a file")
ACCEPTED = {
    **dict.fromkeys(("check", "rehearse", "approve", "snapshot", "predict", "evaluate", "export"), (SITE,)),
    **dict.fromkeys(("add", "upgrade", "rotate", "remove", "revoke", "stop"), (WHOLE, SERVER)),
    **dict.fromkeys(("local", "renew"), (WHOLE,)),
    **dict.fromkeys(("status", "verify-log"), (WHOLE, SERVER, SITE)),
    "models": (WHOLE, SITE),
}
"""Folders that each command accepts."""
FURTHER = {
    **dict.fromkeys(("add", "rotate", "remove", "revoke"), ("site-1",)),
    **dict.fromkeys(("predict", "evaluate"), ("rows.csv",)),
    "export": ("--out", "model.onnx"),
}
"""What a command needs besides the folder."""
CASES = [
    (name, place)
    for name, accepted in ACCEPTED.items()
    for place in (WHOLE, SERVER, SITE, *OTHERS)
    if place not in accepted and not (name == "verify-log" and place in ("no folder", "a file"))  # it takes files too
]


@pytest.fixture
def places(written: Path, tmp_path: Path) -> dict[str, Path]:
    """One folder of each kind, each as on a machine of its own."""
    made = {WHOLE: "all/try", SERVER: "one/server", SITE: "two/site", **{one: f"three/{one[-9:]}" for one in OTHERS}}
    paths = {place: tmp_path / name for place, name in made.items()}
    shutil.copytree(written, paths[WHOLE])
    shutil.copytree(written / "server", paths[SERVER])
    shutil.copytree(written / "sites" / "site-1", paths[SITE])
    paths["an empty folder"].mkdir(parents=True)
    paths["a file"].write_text("x")
    return paths


def test_every_command_on_a_folder_is_tried() -> None:
    commands = {*get_command(deploy).commands}  # type: ignore[attr-defined]
    assert commands - {*ACCEPTED} == {"init", "analyze"}  # they read an experiment file


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_wrong_folder_is_called_what_it_is_with_a_cure_that_works_there(
    name: str, place: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "three" / "rows.csv").write_text("a\n1\n")
    monkeypatch.chdir(tmp_path / "three")
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["deploy", name, str(places[place]), *FURTHER.get(name, ())])
    assert done.exit_code == 2, done.output
    [line] = done.output.splitlines()
    assert line.count(describe_folder(places[place])) == 1
    assert line.count("server.toml") <= 1
    assert sorted(tmp_path.rglob("*")) == before
    if place == SITE:  # neither a server, nor the directory of the deployment, nor its authority is there
        assert "the coordinator" in line or "'fedloom deploy init' wrote" in line
        assert "Copy" not in line
    if place == SERVER:
        assert "at a site" in line or "'fedloom deploy init' wrote" in line


def test_the_folders_of_sites_in_a_folder_are_named(places: dict[str, Path]) -> None:
    whole = places[WHOLE]
    for folder in (whole, whole / "sites"):
        said = CliRunner().invoke(app, ["deploy", "check", str(folder), "--offline"]).output
        named = said.strip().rpartition("folder: ")[2].split(", ")
        assert named == [str(whole / "sites" / f"site-{k}") for k in range(3)]


def test_a_certificate_is_renewed_where_the_authority_is(places: dict[str, Path]) -> None:
    for place, cure in (
        (SITE, "A site cannot renew the server's certificate and needs no new file. Ask the coordinator to renew it"),
        (SERVER, "where authority/ is kept. Then copy the new server.crt and server.key from its folder server/ to"),
        ("an empty folder", "put authority/ back into it from the place where you keep it"),
    ):
        done = CliRunner().invoke(app, ["deploy", "renew", str(places[place])])
        assert done.exit_code == 2
        assert cure in done.output
    shutil.move(places[WHOLE] / "authority", places[WHOLE].parent / "safe")
    said = CliRunner().invoke(app, ["deploy", "renew", str(places[WHOLE])]).output
    assert "is the directory of a whole deployment. Pass" in said
    assert "put authority/ back into it" in said
    shutil.move(places[WHOLE].parent / "safe", places[WHOLE] / "authority")
    assert CliRunner().invoke(app, ["deploy", "renew", str(places[WHOLE])]).exit_code == 0
