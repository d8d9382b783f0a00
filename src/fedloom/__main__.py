"""``python -m fedloom`` is the command ``fedloom``."""

from fedloom.cli import main

main()
