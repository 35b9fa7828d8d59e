"""Pairs of equal models in PyTorch and JAX, and bugs to put into one side of them."""
