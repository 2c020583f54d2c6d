"""The refits: one file each, named like the method."""
