"""What one process does with a table reference: plans, reads, lookups, transactions, and `LookupTable`."""
