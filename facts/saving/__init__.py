"""Compressed networks in folders, on Hugging Face, and in the formats of other runtimes."""
