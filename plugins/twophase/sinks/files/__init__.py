"""The files sink: a table of files, with one folder per checkpoint or slot."""
