"""Where bytes are: disk, object store, database, and how Spark and Arrow get at them."""
