"""The steps in which a decision becomes edits, one in each module; `realise.py` has their order."""
