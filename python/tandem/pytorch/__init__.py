"""tandem beside PyTorch: what `tandem.optim` is made of. Imports torch."""
