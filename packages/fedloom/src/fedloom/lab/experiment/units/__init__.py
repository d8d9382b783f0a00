"""Units of work of an experiment: how many run side by side, and how several processes and machines share them."""
