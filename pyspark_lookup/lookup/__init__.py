"""What one process does with a table that is named by a path and options: plans, reads, lookups, transactions, and `LookupTable`."""
