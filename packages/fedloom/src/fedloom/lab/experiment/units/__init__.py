"""Units of work of an experiment: how many go side by side, and how several processes and machines share them."""
