"""What goes between the server and the sites: messages, signatures, who is there, what of a reply counts."""
