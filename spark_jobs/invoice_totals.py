"""Sum invoices per customer: a plain Spark script with an input and an output, like any other."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own habit


def main() -> None:
    """Read the files that a list names, write Parquet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in", dest="listed", type=Path, required=True, help="a file with an input path a line")
    parser.add_argument("--out", required=True, help="the folder to write to")
    arguments = parser.parse_args()
    spark = SparkSession.builder.appName("invoice totals").getOrCreate()
    invoices = spark.read.csv(arguments.listed.read_text().splitlines(), header=True, inferSchema=True)
    totals = invoices.groupBy("customer").agg(F.sum("amount").alias("total"))
    totals.write.parquet(arguments.out)
    spark.stop()


if __name__ == "__main__":
    main()
