"""Units of work in an experiment: how many run in parallel, and how they are divided across processes and machines."""
