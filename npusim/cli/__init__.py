"""The command line: one file for each sub-command, nothing that a library user could need."""
