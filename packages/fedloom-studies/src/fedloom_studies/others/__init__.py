"""Tables of other programs: their data and splits, and a page that compares their results with those of fedloom."""
