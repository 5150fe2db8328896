"""The solvers of the literature; `candidates` has the table of them."""
