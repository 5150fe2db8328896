"""Edits that XLA needs besides copies: guards, barriers, an order, late updates."""
