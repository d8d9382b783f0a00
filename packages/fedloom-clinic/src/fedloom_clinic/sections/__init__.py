"""Sections of the report on clinical analyses. They are made with the public toolkit `fedloom.lab.sections`."""
