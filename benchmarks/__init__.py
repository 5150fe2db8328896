"""Training jobs and measurements behind the numbers in the documentation."""
