"""Studies with fedloom: the papers' tables and figures, and the map of every method in every kind of federation."""
