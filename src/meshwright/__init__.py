"""Meshwright: train language models in parallel with JAX, the same answer on any layout."""

__version__ = "0.1.0"
