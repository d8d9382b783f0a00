"""Paths on the command line: folders that cannot be, and words that are empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import call

FILE = """
rounds = 1
[data]
source = "digits"
[partition]
kind = "iid"
clients = 3
keep = 60
[[method]]
algorithm = "fedavg"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path / "small.toml"


@pytest.mark.parametrize("below", ["", "run"])
@pytest.mark.parametrize(
    "words",
    [
        ["run", "FILE", "--out"],
        ["tune", "FILE", "--out"],
        ["deploy", "init", "FILE", "--out"],
        ["reproduce", "fiaelt-synthetic", "--scale", "smoke", "--out"],
        ["reproduce", "fiaelt-synthetic", "--scale", "smoke", "--results"],
        ["map", "--scale", "smoke", "--setup", "iid", "--method", "fedavg", "--results"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_folder_that_cannot_be_is_named_for_what_it_is(words: list[str], below: str, file: Path) -> None:
    plain, dangling, ring = (file.with_name(name) for name in ("plain", "dangling", "ring"))
    plain.write_text("kept")
    dangling.symlink_to("nowhere")
    ring.symlink_to("ring")
    for place, fault in (
        (plain, "is a file, not a folder; choose another folder"),
        (dangling, "is a link to nowhere, which is not there; remove it, or choose another folder"),
        (ring, "is a link to ring, which is not there; remove it, or choose another folder"),
    ):
        said = call(*(file if word == "FILE" else word for word in words), place / below, code=2)
        assert f"error: {place} {fault}" in said
    assert plain.read_text() == "kept"
    assert not file.with_name("nowhere").exists()
