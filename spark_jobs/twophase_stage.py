"""Stage one attempt: what spark-submit runs when it cannot be given a file of the package itself."""

from __future__ import annotations

import sys

from twophase.spark.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
