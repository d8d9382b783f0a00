"""Tables in files: their reading, their cells, and the levels of their columns."""
