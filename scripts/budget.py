"""Check that no folder of the source has more lines of code than budget.toml allows, and print the size of imports.

    python scripts/budget.py           # compare the lines of code with budget.toml; exit code 1 if there are too many
    python scripts/budget.py --write   # write the current numbers of lines to budget.toml

Docstrings, comments and blank lines do not count as lines of code. Each subfolder of a package has a limit, and so do
the modules at the top of the package. If a limit is exceeded, remove code, or raise the limit in a commit that states
what users get in return.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "budget.toml"
LAB = "lab"
"""Folder of the library whose subfolders have separate limits, like the subfolders of a package."""
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
"""Types of tokens that do not count as code."""
CLOSURES = {
    "fl.simulate": "import fedloom as fl; fl.simulate",
    "fl.compare": "import fedloom as fl; fl.compare",
    "a site": "import fedloom_sites.deploy.site.client",
}
"""Imports whose size is printed: the modules that they load, and the lines of code in these modules."""
HEAD = """# Maximum lines of code in each folder of a package, checked by scripts/check. If a limit is exceeded, remove
# code, or raise the limit in a commit that states what users get. python scripts/budget.py --write writes this file.
"""


@cache
def count_lines(text: str) -> int:
    """Return the number of lines of code in the text of a Python file."""
    strings = set[int]()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                strings |= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def room_of(file: Path, source: Path) -> tuple[str, str]:
    """Return the package and the subfolder that contain a file. The lab is treated as a separate package."""
    package, *parts = file.relative_to(source).parts
    if parts[0] == LAB and len(parts) > 1:
        package, parts = f"{package}.{LAB}", parts[1:]
    return package, parts[0] if len(parts) > 1 else "top"


def count_rooms() -> dict[str, Counter[str]]:
    """Return the number of lines of code in every subfolder, keyed by package."""
    rooms: dict[str, Counter[str]] = {}
    for source in sorted(ROOT.glob("packages/*/src")):
        for file in sorted(source.rglob("*.py")):
            package, room = room_of(file, source)
            rooms.setdefault(package, Counter())[room] += count_lines(file.read_text())
    return rooms


def find_excess(rooms: dict[str, Counter[str]], budget: dict[str, dict[str, int]]) -> list[str]:
    """Return a sentence for every subfolder that exceeds its limit, and for every subfolder without a limit."""
    return [
        f"{package}/{room}: {lines} lines of code, but the limit is {budget.get(package, {}).get(room, 'missing')}. "
        "Remove code, or raise the limit in budget.toml in a commit that states what users get in return"
        for package, counts in rooms.items()
        for room, lines in sorted(counts.items())
        if lines > budget.get(package, {}).get(room, -1)
    ]


def print_closures() -> None:
    """Print the number of modules and lines of code that each import loads in a new interpreter."""
    for name, code in CLOSURES.items():
        listing = (
            "import sys; print(*{m.__file__ for n, m in sys.modules.items() if n.startswith('fedloom')}, sep='\\n')"
        )
        done = subprocess.run([sys.executable, "-c", f"{code}; {listing}"], capture_output=True, text=True, check=True)
        files = [Path(line) for line in done.stdout.split("\n") if line.endswith(".py")]
        print(f"import of {name}: {len(files)} modules, {sum(count_lines(f.read_text()) for f in files)} lines of code")


def main(words: list[str]) -> int:
    """Compare the source with the budget, and return 1 if a limit is exceeded."""
    rooms = count_rooms()
    if words == ["--write"]:
        tables = (
            f'["{package}"] # {counts.total()} in all\n' + "".join(f"{r} = {n}\n" for r, n in sorted(counts.items()))
            for package, counts in rooms.items()
        )
        BUDGET.write_text(HEAD + "\n" + "\n".join(tables))
        return 0
    excess = find_excess(rooms, tomllib.loads(BUDGET.read_text()))
    for package, counts in rooms.items():
        print(f"{package}: {counts.total()} lines of code")
    print_closures()
    print(*excess, sep="\n", end="\n" if excess else "")
    return int(bool(excess))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
