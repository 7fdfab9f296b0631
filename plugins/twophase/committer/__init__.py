"""The record in PostgreSQL: its tables, the transactions of the protocol over them, queries, migrations."""
