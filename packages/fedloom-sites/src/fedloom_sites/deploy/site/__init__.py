"""One site: its answers, its state on its own disk, its ledger, its models."""
