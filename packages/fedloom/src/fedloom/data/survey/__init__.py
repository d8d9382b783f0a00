"""Survey of a table before a run: facts of its columns, a draft of the experiment, and the agreement of sites."""
