"""What Grappler makes of a step, asked before the step runs."""
