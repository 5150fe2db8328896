"""The user's options, budgets and policies, checked before anything is traced."""
