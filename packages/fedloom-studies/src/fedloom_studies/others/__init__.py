"""Tables of others: their data as they cut them, and the page that compares their figures with fedloom's."""
