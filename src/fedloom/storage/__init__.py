"""Files: written whole or not at all; rows, checkpoints and their undo journal."""
