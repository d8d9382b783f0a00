"""Operation of a deployment: plan, keys, files of every side, commands of Flower, processes, checks and status."""
