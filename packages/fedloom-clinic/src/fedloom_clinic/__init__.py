"""Clinical analyses. fedloom's registry finds them through their entry points."""
