"""A host's cached rows of a table (FLIP-221): all of them, or those of the requested keys."""
