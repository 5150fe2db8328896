"""Prices a step: bytes of storages and times of vertices, as a `CostGraph`. No TensorFlow."""
