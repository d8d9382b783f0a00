"""Virtual time: the clock of a run, and the next step of its server by the schedule."""
