"""The `mini` profile's stand-ins: toy data that ship with dependencies, and small networks trained on them."""

from pathlib import Path

CHECKPOINTS = Path(__file__).with_name("checkpoints")
