"""Sections of the report on clinical analyses. The sections are made with the public toolkit `fedloom.lab.sections`."""
