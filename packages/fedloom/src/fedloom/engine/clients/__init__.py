"""Clients of a round: chunks of them on this machine, and clients on other machines."""
