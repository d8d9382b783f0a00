"""Entry point of ``python -m fedloom.lab.cli``, which runs the command ``fedloom``."""

from fedloom.lab.cli import main

main()
