"""Clients of a round: chunks of simulated clients on this machine and clients on other machines."""
