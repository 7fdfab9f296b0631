"""Run `twophase` as `python -m twophase.cli`."""

from __future__ import annotations

from twophase.cli import main

if __name__ == "__main__":
    main()
