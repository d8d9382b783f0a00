"""Transport: the run at a client, the encoding of its messages, and the roll of nodes, for sites and Flower apps."""
