"""The write-ahead sink: stages rows, and sends them to any system once their checkpoint is decided."""
