"""Work on Arrow columns: keys and their index, types, predicates. The hot path."""
