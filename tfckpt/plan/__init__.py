"""Chooses a schedule with repeats for a cost graph and a budget. No TensorFlow."""
