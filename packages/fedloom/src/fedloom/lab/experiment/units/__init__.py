"""Units of work of an experiment: how many run in parallel, and how several processes and machines share them."""
