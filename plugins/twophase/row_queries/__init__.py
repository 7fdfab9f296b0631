"""Queries over rows, for audits and comparisons: over files by DuckDB, over tables by their own database."""
