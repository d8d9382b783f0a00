"""The server: the rounds of a run at real sites, the connection to these sites, and the sites that answer."""
