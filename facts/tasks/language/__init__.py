"""Language modelling and its benchmarks."""
