"""Rehearsals before a study: a dishonest server attacks copies of a site that use the site's own data and settings."""
