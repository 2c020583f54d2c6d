"""From Kronecker factors to a decomposition whose leading part is the best approximation of every rank."""
