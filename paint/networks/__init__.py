"""The networks: UNets, VAE, encoders, and their weights."""
