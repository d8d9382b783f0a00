"""The run at a client, the encoding of its messages, and the list of known nodes, for sites and for Flower apps."""
