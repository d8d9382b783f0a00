"""Operation of a deployment: plan, keys, files of every party, Flower commands, processes, checks and status."""
