"""Start of a site as a service.

The current `site.toml` is read at each start, so the unit can stay the same if the server or port changes.

``python -m fedloom_sites.deploy.ops.join SITE.TOML`` starts a process that becomes the site's network process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedloom.errors import FedloomError
from fedloom_sites.deploy.ops.commands import command_words
from fedloom_sites.deploy.setting_files import read_site


def main(file: Path) -> None:
    """Replace this process with the network process of the site with this TOML file."""
    try:
        words = command_words("supernode", read_site(file.resolve()), file=file.resolve())
    except FedloomError as error:
        sys.exit(f"fedloom: {error}")
    os.execv(words[0], words)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
