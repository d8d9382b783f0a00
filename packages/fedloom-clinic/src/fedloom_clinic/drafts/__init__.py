"""Drafts of experiment files, based on a survey of a table, the roles of its columns, and questions to the user."""
