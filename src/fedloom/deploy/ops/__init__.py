"""What makes a machine run a deployment: keys, files of every side, commands of Flower, processes."""
