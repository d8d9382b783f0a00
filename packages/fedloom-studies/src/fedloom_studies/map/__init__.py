"""The map: all methods, including users' own, measured in the same way in many kinds of federations."""
