"""Names of recipes and setups for the shell's completion, read from files."""

import tomllib
from importlib.resources import files

from fedloom.lab.cli import offer

_PACKAGE = files("fedloom_studies")

recipes = offer(
    lambda: sorted(f.name[:-5] for f in (_PACKAGE / "reproduce" / "recipes").iterdir() if f.name.endswith(".toml"))
)
"""Names for ``fedloom reproduce``."""
setups = offer(lambda: tomllib.loads((_PACKAGE / "map" / "setups.toml").read_text(encoding="utf-8"))["setup"])
"""Names for ``fedloom map``."""
