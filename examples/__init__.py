"""Runnable examples: `python -m examples.quickstart`, `python -m examples.demo`."""
