"""Charts for the report and other pages: shared components, a theme, and one module per subject."""
