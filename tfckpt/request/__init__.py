"""What a person asks for, checked before anything is traced: options, budgets, policies."""
