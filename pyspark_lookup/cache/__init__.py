"""The rows of a table that a host caches (FLIP-221): all rows (the full cache), or those of the keys that were looked up (the partial cache)."""
