"""A table in PostgreSQL."""
