"""Rehearsals: a dishonest server attacks a site's own data and settings before a study, on copies of the site."""
