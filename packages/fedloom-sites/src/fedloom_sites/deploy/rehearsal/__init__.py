"""Rehearsals before a study: a dishonest server attacks copies of a site with the site's own data and settings."""
