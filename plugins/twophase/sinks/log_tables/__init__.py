"""The sinks for log tables: Delta and Iceberg."""
