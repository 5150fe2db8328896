"""Sizes that a trace leaves open, and those that only values decide."""
