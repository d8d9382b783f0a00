"""The server: the rounds of a run at real sites, the connection to the sites, and the sites that answer."""
