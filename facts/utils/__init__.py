"""Tools that know nothing of the method: files, caches, processes, random draws, batches, progress."""
