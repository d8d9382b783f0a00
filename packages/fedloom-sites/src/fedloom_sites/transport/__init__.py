"""The run at a client, the encoding of its messages, and the list of known nodes, for both sites and Flower apps."""
