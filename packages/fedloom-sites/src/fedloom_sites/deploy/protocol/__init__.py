"""Messages between the server and the sites: their form, their signatures, and the checks of replies."""
