"""Names of recipes and setups for shell completion, read from the package's data files."""

import tomllib
from importlib.resources import files

from fedloom.lab.cli import complete_from

_PACKAGE_FILES = files("fedloom_studies")

recipes = complete_from(
    lambda: sorted(
        f.name[:-5] for f in (_PACKAGE_FILES / "reproduce" / "recipes").iterdir() if f.name.endswith(".toml")
    )
)
"""Names that complete an argument of ``fedloom reproduce``."""
setups = complete_from(
    lambda: tomllib.loads((_PACKAGE_FILES / "map" / "setups.toml").read_text(encoding="utf-8"))["setup"]
)
"""Names for shell completion of an argument of ``fedloom map``."""
