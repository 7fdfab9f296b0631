"""`python -m twophase.cli` is `twophase`."""

from __future__ import annotations

from twophase.cli import main

if __name__ == "__main__":
    main()
