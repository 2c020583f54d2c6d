"""Launchers of the parts of a grid: in this process or several, on a Ray cluster, in jobs of Slurm."""
