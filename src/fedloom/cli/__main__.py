"""``python -m fedloom.cli`` is the command ``fedloom``."""

from fedloom.cli import main

main()
