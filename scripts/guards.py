"""Take protections out of the code one at a time, in a copy of it, and see whether their tests notice.

`tests/guards.toml` has a row per protection: ``guard`` says what it is, ``file`` has it, ``change`` is a text of the
file and what takes its place, and ``test`` is the test, as pytest names it, that must fail then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "guards.toml"
PACKAGES = sorted(folder.relative_to(ROOT) for folder in ROOT.glob("packages/*"))
"""Folders of the packages; each has ``src`` and ``tests``."""
SECONDS = 300
"""Of a test; one that hangs without its guard has noticed."""
FAILED = 1
"""Exit status of pytest where a test failed, and nothing else went wrong."""


@dataclass(frozen=True)
class Guard:
    """A row of `LIST`."""

    guard: str
    file: str
    change: tuple[str, str]
    test: str

    def changed(self) -> str:
        """The file without the guard.

        Raises:
            ValueError: it does not hold the text to change exactly once.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        count = text.count(self.change[0])
        if count != 1:
            raise ValueError(f"{self.guard}: {self.file} holds {self.change[0]!r} {count} times, wanted is once")
        return text.replace(*self.change)


def guards() -> list[Guard]:
    """The rows of `LIST`."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["guard"]
    return [Guard(row["guard"], row["file"], tuple(row["change"]), row["test"]) for row in rows]


def run(root: Path, tests: list[str], seconds: float) -> tuple[int, str]:
    """Exit status and output of tests on the sources below a root; the status is 1 where they hang or crash."""
    sources = [str(root / folder / "src") for folder in PACKAGES]
    helpers = [str(ROOT / folder) for folder in PACKAGES]  # the tests import each other's as tests.NAME
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, "-o", f"pythonpath={' '.join([*sources, *helpers, str(ROOT)])}", *tests],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {seconds:g} s"
    return (FAILED if done.returncode < 0 else done.returncode), done.stdout + done.stderr


def noticed(guard: Guard) -> str:
    """What is wrong with a guard's test: empty where it fails without the guard."""
    with tempfile.TemporaryDirectory(prefix="fedloom-guard-") as folder:
        for package in PACKAGES:
            shutil.copytree(ROOT / package / "src", Path(folder) / package / "src")
        place = Path(folder) / guard.file
        place.write_text(guard.changed(), encoding="utf-8")
        for compiled in place.parent.glob(f"__pycache__/{place.stem}.*"):
            compiled.unlink()
        status, output = run(Path(folder), [guard.test], SECONDS)
    if status == FAILED:
        return ""
    what = "passes without it" if status == 0 else f"does not run without it (pytest ends with {status})"
    return f"{guard.guard}: {guard.test} {what}\n{output[-2000:]}"


def main(words: list[str]) -> int:
    """Tries the guards whose text has one of the words, or all; 1 where one is not noticed."""
    chosen = [g for g in guards() if not words or any(word in f"{g.guard} {g.file} {g.test}" for word in words)]
    status, output = run(ROOT, sorted({g.test for g in chosen}), SECONDS * len(chosen))
    if status:
        print(f"tests fail with every guard in its place:\n{output[-4000:]}")
        return 2
    missed = 0
    for guard in chosen:
        wrong = noticed(guard)
        missed += bool(wrong)
        print(wrong or f"noticed: {guard.guard}", flush=True)
    print(f"\n{len(chosen) - missed}/{len(chosen)} protections are noticed when they are gone")
    return int(missed > 0)
