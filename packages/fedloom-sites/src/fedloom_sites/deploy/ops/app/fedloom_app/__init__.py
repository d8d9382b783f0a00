"""The app that Flower carries to the sites: it names what is installed there."""
