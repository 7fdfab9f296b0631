"""Examples of pipelines to read, run and copy."""
