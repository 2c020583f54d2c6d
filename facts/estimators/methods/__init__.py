"""The estimators, one file each, called by its name."""
