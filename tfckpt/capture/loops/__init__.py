"""Loops of a captured step: what they keep for their gradients, and which may run twice."""
