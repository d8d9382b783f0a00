"""Messages between the server and the sites: their format, their signatures, and the checks of replies."""
