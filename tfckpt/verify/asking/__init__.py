"""XLA and Grappler asked what they would make of a step, as it is or with edits."""
