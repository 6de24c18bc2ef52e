"""What a host keeps of a table's rows (FLIP-221): all of them, or those of the requested keys."""
