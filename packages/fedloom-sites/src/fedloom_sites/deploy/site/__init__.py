"""A site's answers, local state, ledger and models."""
