"""The searches, one file each, called by its name."""
