"""Tools independent of the method: files, caches, processes, random draws, batches, progress."""
