"""The estimators: one file each, named like the method."""
