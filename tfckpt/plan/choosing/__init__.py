"""What is chosen from: plans with all that they will have, and the rules by which one is taken."""
