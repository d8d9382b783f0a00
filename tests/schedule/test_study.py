"""The studies of virtual time, with tiny runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_study_makes_the_runs_that_are_missing(tmp_path: Path) -> None:
    main = runpy.run_path(str(ROOT / "studies" / "scripts" / "time"))["main"]
    out = tmp_path / "runs.jsonl"
    main(["fedbuff", "--smoke", "--target", "0.3", "--out", str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["schedule"] for line in lines] == ["synchronous", "over-selection", "buffered"]
    assert lines[0]["seconds_to_target"] > lines[1]["seconds_to_target"]
    main(["fedbuff", "--smoke", "--out", str(out)])
    assert len(out.read_text().splitlines()) == 3
