"""Tables in files and in memory: reading, cells, and levels of columns."""
