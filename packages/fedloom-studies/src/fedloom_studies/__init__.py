"""Studies made with fedloom: tables and figures in papers, and a map of all methods in many federations."""
