"""Studies made with fedloom: tables and figures of papers, and a map of all methods in many federations."""
