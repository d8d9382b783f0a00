"""Remove protections from a copy of the code, one at a time, and check that their tests fail.

`tests/guards.toml` contains an entry for each protection. ``guard`` describes the protection, ``file`` is the file that
implements it, ``change`` contains a text in this file and the text that replaces it, and ``test`` is the pytest id of
the test that must then fail.
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
"""Folders of the packages, each of which contains ``src`` and ``tests``."""
SECONDS = 300
"""Time limit of a test. A test that exceeds this limit without its protection is regarded as failed."""
FAILED = 1
"""Exit code with which pytest reports failed tests, as opposed to other problems."""


@dataclass(frozen=True)
class Guard:
    """Protection that `LIST` describes."""

    guard: str
    file: str
    change: tuple[str, str]
    test: str

    def remove_guard(self) -> str:
        """Return the text of the file without the protection.

        Raises:
            ValueError: the file does not contain the text to be replaced exactly once.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        count = text.count(self.change[0])
        if count != 1:
            raise ValueError(f"{self.guard}: {self.file} must contain {self.change[0]!r} once, got {count} times")
        return text.replace(*self.change)


def read_guards() -> list[Guard]:
    """Return the protections that `LIST` describes."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["guard"]
    return [Guard(row["guard"], row["file"], tuple(row["change"]), row["test"]) for row in rows]


def run_tests(root: Path, tests: list[str], seconds: float) -> tuple[int, str]:
    """Run tests on the sources in a folder, and return pytest's exit code (1 if they hang or crash) and output."""
    sources = [str(root / folder / "src") for folder in PACKAGES]
    helpers = [str(ROOT / folder) for folder in PACKAGES]  # tests import modules of other tests as tests.NAME
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, "-o", f"pythonpath={' '.join([*sources, *helpers, str(ROOT)])}", *tests],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return FAILED, f"the tests did not end within {seconds:g} s"
    return (FAILED if done.returncode < 0 else done.returncode), done.stdout + done.stderr


def find_problem(guard: Guard) -> str:
    """Run the test without the protection, and return the problem, or "" if the test fails as it should."""
    with tempfile.TemporaryDirectory(prefix="fedloom-guard-") as folder:
        for package in PACKAGES:
            shutil.copytree(ROOT / package / "src", Path(folder) / package / "src")
        place = Path(folder) / guard.file
        place.write_text(guard.remove_guard(), encoding="utf-8")
        for compiled in place.parent.glob(f"__pycache__/{place.stem}.*"):
            compiled.unlink()
        status, output = run_tests(Path(folder), [guard.test], SECONDS)
    if status == FAILED:
        return ""
    what = "passes without it" if status == 0 else f"does not run without it (exit code of pytest: {status})"
    return f"{guard.guard}: {guard.test} {what}\n{output[-2000:]}"


def main(words: list[str]) -> int:
    """Try the protections that contain one of the words, or all of them, and return 1 if a test does not fail."""
    chosen = [g for g in read_guards() if not words or any(word in f"{g.guard} {g.file} {g.test}" for word in words)]
    status, output = run_tests(ROOT, sorted({g.test for g in chosen}), SECONDS * len(chosen))
    if status:
        print(f"some tests fail although no protection was removed:\n{output[-4000:]}")
        return 2
    missed = 0
    for guard in chosen:
        wrong = find_problem(guard)
        missed += bool(wrong)
        print(wrong or f"noticed: {guard.guard}", flush=True)
    print(f"\nthe tests noticed the removal of {len(chosen) - missed} of {len(chosen)} protections")
    return int(missed > 0)
