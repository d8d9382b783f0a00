"""The app that Flower carries to the sites: it names code that is installed there."""
