"""``python -m fedloom`` is the command ``fedloom``."""

from fedloom.lab.cli import main

main()
