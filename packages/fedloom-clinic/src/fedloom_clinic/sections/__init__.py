"""Sections of the report about clinical analyses, made with the public toolkit `fedloom.lab.sections`."""
