"""Report on the measurements, their provenance and their distance from the paper."""
