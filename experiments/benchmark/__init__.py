"""Benchmarks, one per file; `python -m experiments.benchmark` runs them."""
