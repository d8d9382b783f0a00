"""The map: every method in every kind of federation, measured in the same way, and open to any user's method."""
