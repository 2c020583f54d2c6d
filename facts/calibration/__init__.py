"""The network, its layers, the data and the loss: what every step starts from."""
