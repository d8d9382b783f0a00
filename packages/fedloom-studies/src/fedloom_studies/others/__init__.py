"""Tables of other programs: their data and splits, and the page that compares their results with fedloom's."""
