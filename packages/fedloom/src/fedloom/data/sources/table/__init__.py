"""Reading of tables from files and from memory: cells, columns and their levels."""
