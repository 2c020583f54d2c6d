"""From Kronecker factors to a decomposition whose leading components are the best approximation at every rank."""
