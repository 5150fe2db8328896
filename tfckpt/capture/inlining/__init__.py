"""Functions that a step calls put in the place of the calls, in a live graph."""
