"""How loops are recomputed: whole, or segment by segment."""
