"""Benchmarks, one a file; `python -m experiments.benchmark` runs them."""
