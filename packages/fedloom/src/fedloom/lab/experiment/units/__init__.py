"""Units of work in an experiment: how many run in parallel, and how processes and machines divide them."""
