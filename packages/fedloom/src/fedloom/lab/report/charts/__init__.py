"""Charts of the report and of every other page: their parts, their theme, and one module per subject."""
