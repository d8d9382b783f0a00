"""The commands of the clinic fit with a penalty, and print the concordance on rows that were left out of the fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lifelines.utils import concordance_index
from typer.testing import CliRunner

from fedloom.lab.cli import app
from fedloom_clinic.fits.cox import SurvivalSite, fit_cox


def call(*words: object, code: int = 0) -> str:
    """Run a command, and return what it prints."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


def patients(rows: int, seed: int) -> SurvivalSite:
    """Tied times, some of them 0; the third column is rare and has no event, so that it separates the rows."""
    rng = np.random.default_rng(seed)
    x = np.stack([rng.normal(0, 1, rows), rng.normal(64, 12, rows), (rng.random(rows) < 0.06) * 1.0], 1)
    time, end = rng.exponential(50 * np.exp(-x[:, 0] / 2)), rng.exponential(60, rows)
    event = ((time <= end) & (x[:, 2] == 0)) * 1.0
    return SurvivalSite(x, np.floor(np.minimum(time, end) / 5) * 5, event)


X, TIME, EVENT = (np.concatenate(parts) for parts in zip(patients(150, 1), patients(80, 2), strict=True))
N = len(X)


@pytest.mark.filterwarnings("ignore")  # of lifelines, on pandas
def test_the_commands_take_a_penalty_and_test_rows(tmp_path: Path) -> None:
    names = np.repeat(["a", "b"], [150, 80])
    rows = zip(names, *X.T, TIME, EVENT, strict=True)
    lines = [",".join([*map(str, row), "test" if k % 4 == 0 else "train"]) for k, row in enumerate(rows)]
    (tmp_path / "t.csv").write_text("\n".join(["site,p,q,r,days,died,fold", *lines]))
    text = f'[data]\nsource = "{tmp_path}/t.csv"\nclient_column = "site"\n{{}}\n[partition]\nkind = "natural"\n'
    # no method: nothing is trained
    (tmp_path / "t.toml").write_text(text.format('target = "days"\nevent = "died"'))
    (tmp_path / "g.toml").write_text(text.format('target = "died"\ndrop = ["fold", "days"]'))
    train = np.arange(N) % 4 > 0
    sites = [
        SurvivalSite(X[keep], TIME[keep], EVENT[keep]) for keep in (train & (names == "a"), train & (names == "b"))
    ]
    fit = fit_cox(sites, penalty="ridge", strength=0.1)
    said = call("cox", tmp_path / "t.toml", "--penalty", "ridge", "--strength", "0.1", "--test", "fold=test")
    for name, beta in zip("pqr", fit.beta, strict=True):
        line = next(line for line in said.splitlines() if line.strip().startswith(f"{name} "))
        assert f"{beta:.4g}"[:5] in line
    c = concordance_index(TIME[~train], -(X[~train] @ fit.beta), EVENT[~train])
    assert f"concordance on 58 test rows with {int(EVENT[~train].sum())} events: {c:.3f}"[:-1] in said
    assert "ridge of strength 0.1. Standard errors" in said
    assert "Firth's penalty" in call("glm", tmp_path / "g.toml", "--penalty", "firth")
    assert "largest held-out likelihood" in call("glm", tmp_path / "g.toml", "--penalty", "ridge")
    assert "other rows" in call("cox", tmp_path / "t.toml", "--test", "fold=tets", code=2)
    assert "COLUMN=VALUE" in call("cox", tmp_path / "t.toml", "--test", "fold", code=2)
    assert "has no strength" in call("glm", tmp_path / "g.toml", "--strength", "1", code=2)
    assert "without --bins" in call("cox", tmp_path / "t.toml", "--bins", "5", "--penalty", "firth", code=2)
