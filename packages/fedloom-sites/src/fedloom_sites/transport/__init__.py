"""The run at a client, the encoding of its messages, and the roll of nodes, for both sites and Flower apps."""
