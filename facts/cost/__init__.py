"""Cost of a network: operations, parameters, time."""
