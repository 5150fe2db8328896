"""The forward pass as solvers see it: graphs, stages, lower sets, division trees."""
