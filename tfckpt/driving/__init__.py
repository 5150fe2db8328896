"""What the driver is made of: parts of a step, proposals, and the judges they pass."""
