"""What puts edits into a graph: one that is being traced, one in a file, one that is imported."""
