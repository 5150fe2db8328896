"""What a person is told of a step: words, figures, a page, pictures, TensorBoard."""
