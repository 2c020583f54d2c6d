"""One function a figure: from an experiment's records to the figure and the values that it shows."""
