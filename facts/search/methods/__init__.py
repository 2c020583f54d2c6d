"""The searches, one file each; the file's name is the search's name."""
