"""Rows that audits and comparisons ask about, wherever they are: files by DuckDB, tables by their database."""
