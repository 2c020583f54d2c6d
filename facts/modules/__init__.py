"""Low-rank layers, and other layers as calls of linear ones."""
