"""The server: the rounds of a run at real sites, the connection to the sites, and the presence of the sites."""
