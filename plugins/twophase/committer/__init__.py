"""Where a commit is recorded: the tables, the repository over them, the migrations."""
