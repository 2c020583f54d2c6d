"""The version of this package, and that of what it computes."""

__version__ = "0.1.0"
RESULTS = 2
"""Raised with every change that changes a number: cells that were computed before it run again.

A change to one kind of parts raises its `Kind.results` instead.
"""
