"""Okabe and Ito's colours, which the colour-blind can distinguish."""

BLUE, VERMILION, GREEN, ORANGE, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#000000", "#999999"
CURVES = (BLUE, VERMILION, GREEN, ORANGE, "#CC79A7", "#56B4E9")  # of methods, in order; black is the original's
MARKERS = "osD^vPX"
