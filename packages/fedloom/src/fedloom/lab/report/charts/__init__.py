"""Charts of the report and of all other pages: their parts, their theme, and one module per subject."""
