"""From a network and a budget to a smaller network."""
