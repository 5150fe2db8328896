"""What loops and branches allocate, besides their results, while their bodies run."""
