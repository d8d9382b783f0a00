"""Studies with fedloom: tables and figures from papers, and a map of all methods in many federations."""
