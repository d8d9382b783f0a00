"""Reading of tables from files and memory: cells, columns and their levels."""
