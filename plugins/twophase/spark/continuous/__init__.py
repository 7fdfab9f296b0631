"""Continuous SQL inside Spark: a text is analysed, split into state and final expressions, run by batches."""
