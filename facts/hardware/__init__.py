from facts.hardware.speed import Speed, batch_seconds, speeds
from facts.hardware.timing import DEFAULT_TIMING, Timing, TimingPolicy
from facts.hardware.variants import VARIANTS, Variant

__all__ = ["DEFAULT_TIMING", "VARIANTS", "Speed", "Timing", "TimingPolicy", "Variant", "batch_seconds", "speeds"]
