"""Training steps as they occur in real code, each trained plain and rewritten and compared."""
