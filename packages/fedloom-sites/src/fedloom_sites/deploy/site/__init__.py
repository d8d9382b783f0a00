"""Answers, local state, ledger and models of one site."""
