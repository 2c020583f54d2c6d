"""Estimates of what a run will take: sizes of networks, work, speed of this machine, and the plan that shows it."""
