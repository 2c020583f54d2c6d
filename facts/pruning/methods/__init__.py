"""The pruning methods, one file each, called by its name."""
