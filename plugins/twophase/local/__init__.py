"""What runs on one machine: the embedded PostgreSQL, and which committer database is used."""
