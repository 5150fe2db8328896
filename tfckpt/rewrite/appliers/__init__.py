"""Appliers of edits to a graph: one that is being traced, one in a file, one that is imported."""
