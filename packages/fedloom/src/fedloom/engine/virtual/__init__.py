"""Virtual time: the clock of a run, and the next server step under the run's schedule."""
