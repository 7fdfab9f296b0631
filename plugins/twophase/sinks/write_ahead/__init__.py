"""Any system at all: rows are sent once their checkpoint is decided."""
