"""Clients of a round: chunks of clients on this machine, and clients on other machines."""
