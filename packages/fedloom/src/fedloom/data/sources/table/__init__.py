"""Tables in files and in memory: their reading, their cells, and the levels of their columns."""
