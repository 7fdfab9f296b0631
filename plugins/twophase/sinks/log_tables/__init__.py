"""Tables that keep a log of their own: Delta and Iceberg."""
