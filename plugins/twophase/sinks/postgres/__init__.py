"""The PostgreSQL sink: a table in a PostgreSQL database."""
