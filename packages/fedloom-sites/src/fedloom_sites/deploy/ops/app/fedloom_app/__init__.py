"""App that Flower transfers to the sites: it names code that is installed there."""
