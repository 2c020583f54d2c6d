"""Where the parts of a grid run: in this process or several, on a Ray cluster, in jobs of Slurm."""
