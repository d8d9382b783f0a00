"""``python -m fedloom`` runs the command ``fedloom``."""

from fedloom.lab.cli import main

main()
