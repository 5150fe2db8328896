"""Carriers: how a step comes in and how its edits go back. `tfckpt.driver` does the rest."""
