"""A table of files: one folder per checkpoint or slot."""
