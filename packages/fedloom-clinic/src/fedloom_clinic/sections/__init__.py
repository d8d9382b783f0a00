"""Report sections on clinical analyses.

The sections are built with the public toolkit `fedloom.lab.sections`.
"""
