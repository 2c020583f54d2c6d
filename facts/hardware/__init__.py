from facts.hardware.speed import Speed, speeds
from facts.hardware.timing import Timing, TimingPolicy
from facts.hardware.variants import VARIANTS

__all__ = ["VARIANTS", "Speed", "Timing", "TimingPolicy", "speeds"]
