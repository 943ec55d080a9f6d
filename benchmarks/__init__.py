"""Benchmarks: this queue beside its peers on one machine, one server and the same jobs.

`python -m benchmarks --help` says how to run them; `docs/benchmarks/README.md` holds the last results.
"""
