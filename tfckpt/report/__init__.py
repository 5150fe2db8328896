"""Output about a step for its user: text, figures, an HTML page, pictures, TensorBoard."""
