"""Virtual time: a run's clock, and the next server step under its schedule."""
