"""Helpers for every stage: clock, garbage collector, faults, files, lines on a terminal."""
