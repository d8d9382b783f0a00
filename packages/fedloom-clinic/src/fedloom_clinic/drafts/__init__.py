"""Drafts of experiment files: the survey of a table, the roles of its columns, and its questions."""
