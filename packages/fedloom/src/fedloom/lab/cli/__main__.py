"""``python -m fedloom.lab.cli`` is the command ``fedloom``."""

from fedloom.lab.cli import main

main()
