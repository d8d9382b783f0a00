"""The map: every method in every kind of federation, measured in one way, and open to any user's method."""
