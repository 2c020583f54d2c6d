"""The pruning methods, one file each, named like the file."""
