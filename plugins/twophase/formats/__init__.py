"""What is inside files and log tables: types, schemas, statistics, the logs of Delta and Iceberg."""
