"""Low-rank layers, and other layers rewritten as calls to linear ones."""
