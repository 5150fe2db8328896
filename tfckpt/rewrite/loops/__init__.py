"""The functions of loops over segments, and what they are made of."""
