"""Operation of a deployment: plan, keys, files of each party, Flower commands, processes, checks and status."""
