"""``python -m fedloom.lab.cli`` runs the command ``fedloom``."""

from fedloom.lab.cli import main

main()
