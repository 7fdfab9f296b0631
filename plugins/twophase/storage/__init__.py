"""Where data is stored: disk, object store, database; and how Spark and Arrow read and write it."""
