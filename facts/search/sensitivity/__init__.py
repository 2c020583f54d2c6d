"""Sensitivities of layers: measured, predicted to second order, interpolated."""
