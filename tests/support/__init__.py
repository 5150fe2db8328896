"""Independent oracles and generators: nothing here shares code with what it checks."""
