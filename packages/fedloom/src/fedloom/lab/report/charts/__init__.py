"""Charts of the report and of every other page: their parts, their look, and one module per subject."""
