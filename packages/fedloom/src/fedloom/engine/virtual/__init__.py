"""Virtual time: the clock of a run, and the next step of the server under the run's schedule."""
