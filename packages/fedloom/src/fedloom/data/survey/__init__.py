"""Survey of a table before a run: facts about its columns, a draft of the experiment, and the sites' agreement."""
