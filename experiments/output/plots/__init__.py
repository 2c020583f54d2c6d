"""Figures, one function each, from an experiment's records to the figure and its values."""
