"""What files and tables look like inside: types, statistics, the logs of Delta and Iceberg."""
