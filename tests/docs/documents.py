"""The code blocks of the documents, and how each kind is run."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import fedloom as fl
from fedloom.lab.cli import app
from fedloom_sites.deploy.settings import Site
from tests.commands import end, fork

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/llms.txt",
    *(str(p.relative_to(ROOT)) for folder in ("docs", "studies/pages") for p in (ROOT / folder).rglob("*.md")),
]
FENCE = re.compile(
    r"(?P<mark><!-- not run: [^>]+ -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?P<more>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)
SHOWN = {"text", "json", ""}
"""Languages of blocks that are only shown; one with the title "result" is what the Python block before it prints."""
RUN = {"python", "toml", "sh"}
NEAR = 0.05
"""Share by which a number of a result may differ from the one that is shown."""
BASE: dict[str, Any] = {"data": {"source": "digits"}, "method": [{"algorithm": "fedavg"}]}


class Block(NamedTuple):
    """One block: its language, its text, the file it is saved as, its line, and whether it is marked as not run."""

    language: str
    code: str
    title: str | None
    line: int
    skipped: bool


def blocks(document: str) -> Iterator[Block]:
    """The blocks of a document, in order."""
    text = (ROOT / document).read_text()
    for found in FENCE.finditer(text):
        width = len(found["indent"])
        code = "".join(line[width:] if line.strip() else line for line in found["code"].splitlines(keepends=True))
        title = re.search(r'title="([^"]+)"', found["more"])
        line = text.count("\n", 0, found.start()) + 1
        yield Block(found["language"], code, title and title[1], line, found["mark"] is not None)


def run(document: str, folder: Path) -> None:
    """Run the blocks of a document in one folder, the Python ones in one namespace."""
    module = ModuleType(re.sub(r"\W", "_", document))
    sys.modules[module.__name__] = module  # where the annotations of its classes are looked up
    try:
        printed = ""
        sequence = [block for block in blocks(document) if not block.skipped]
        shown = {id(block) for block, after in pairwise(sequence) if after.title == "result"}
        for block in sequence:
            if block.language in RUN:
                code = block.code if id(block) in shown or block.language != "python" else fewer(block.code)
                with redirect_stdout(io.StringIO()) as out:
                    {"python": _python, "toml": _toml, "sh": _sh}[block.language](
                        block._replace(code=code), document, folder, module
                    )
                printed = out.getvalue()
            if block.title == "result":
                assert_alike(printed, block.code, f"{document}:{block.line}")
    finally:
        del sys.modules[module.__name__]


def assert_alike(seen: str, shown: str, where: str) -> None:
    """Equal words, and numbers that differ by no more than processors do."""
    number = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
    assert number.sub("#", seen).split() == number.sub("#", shown).split(), f"{where}: {seen}"
    for one, other in zip(number.findall(seen), number.findall(shown), strict=True):
        assert math.isclose(float(one), float(other), rel_tol=NEAR), f"{where}: {one} is not {other}\n{seen}"


def shorter(text: str) -> str:
    """An experiment with at most 4 rounds, and its first 2 seeds."""
    text = re.sub(r"^rounds = ([5-9]|\d\d+)$", "rounds = 4", text, flags=re.MULTILINE)
    return re.sub(r"^(seeds = \[\d+, \d+)[^\]]*", r"\1", text, flags=re.MULTILINE)


def fewer(code: str) -> str:
    """Limit the calls of a Python block to 4 rounds and 2 seeds."""
    code = re.sub(r"""(\brounds=|"rounds": )([5-9]|\d\d+)\b""", r"\g<1>4", code)
    if "seeds=" in code:
        return re.sub(r"seeds=range\(\d+\)", "seeds=range(2)", code)
    return re.sub(r"fl\.compare\((.*)\)\)$", r"fl.compare(\1, seeds=range(2)))", code, flags=re.MULTILINE)


def _python(block: Block, document: str, folder: Path, module: ModuleType) -> None:
    if block.title:
        (folder / block.title).write_text(block.code)
    code = "\n" * block.line + block.code
    exec(compile(code, str(ROOT / document), "exec", dont_inherit=True), module.__dict__)


def _toml(block: Block, document: str, folder: Path, module: ModuleType) -> None:
    """The file is checked as it stands; the commands after it have fewer rounds and seeds of it to play."""
    if block.title:
        (folder / block.title).write_text(shorter(block.code))
    found = tomllib.loads(block.code)
    if block.title == "site.toml":
        assert set(found) <= set(Site.model_fields), f"{document}:{block.line}: unknown keys"
        found = {"data": found["data"]}
    fl.experiment.parse({**BASE, **found}, f"{document}:{block.line}")


def _sh(block: Block, document: str, folder: Path, module: ModuleType) -> None:
    """Each line by itself: a plain call of fedloom in this process, anything else in bash."""
    for line in block.code.replace("\\\n", " ").splitlines():
        call = re.fullmatch(r"(?P<fails>! )?fedloom (?P<words>[^#|&;<>$`]*)(> (?P<file>\S+))?", line.partition("#")[0])
        if call:
            result = CliRunner().invoke(app, shlex.split(call["words"]))
            code, output = result.exit_code, result.output
            if call["file"]:
                (folder / call["file"]).write_text(result.stdout)
            if call["fails"]:
                code = int(code == 0 or not isinstance(result.exception, SystemExit))
        else:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], env=_environment(), capture_output=True)
            code, output = done.returncode, (done.stdout + done.stderr).decode()
        assert code == 0, f"{document}:{block.line}: {line}: exit code {code}\n{output}"


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path}


def build(out: Path, root: Path = ROOT) -> tuple[int, str]:
    """Build the site of a checkout as ``make docs`` does; return the exit code and what mkdocs prints."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")

    def run() -> None:
        from mkdocs.__main__ import cli

        os.chdir(root)
        warnings.resetwarnings()
        cli(["build", "--strict", "--site-dir", str(out)], standalone_mode=False)

    said = out.with_suffix(".txt")
    return end(fork(run, said)), said.read_text()
