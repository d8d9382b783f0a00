"""Sections of the report on clinical analyses, made with the public kit `fedloom.lab.sections`."""
