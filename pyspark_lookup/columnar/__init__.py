"""Functions over Arrow columns: keys and their hash index, types, predicates. Every lookup and scan runs them, over whole columns at once."""
