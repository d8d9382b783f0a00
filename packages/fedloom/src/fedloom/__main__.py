"""Entry point of ``python -m fedloom``, which runs the command ``fedloom``."""

from fedloom.lab.cli import main

main()
