"""How fast it is, measured beside its peers: `python -m benchmarks --list`."""
