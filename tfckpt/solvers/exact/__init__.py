"""The rematerialization problem as an integer programme, for small graphs (OR-tools)."""
