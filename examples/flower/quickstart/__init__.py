"""A personalised method in a Flower app."""
