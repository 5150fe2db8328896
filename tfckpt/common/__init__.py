"""What every stage may use: a clock, the garbage collector, faults, files, lines on a terminal."""
