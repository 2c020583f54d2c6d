"""Okabe and Ito's colours, which the colour-blind can distinguish."""

BLUE, VERMILION, GREEN, ORANGE, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#000000", "#999999"
CURVES = (ORANGE, VERMILION, GREEN, BLUE, BLACK)  # of methods, in order
