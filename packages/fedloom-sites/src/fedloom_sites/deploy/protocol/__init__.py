"""Messages between the server and the sites: their form, their signatures, and the checks that a reply must pass."""
