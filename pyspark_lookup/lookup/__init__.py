"""A table reference at work in one process: plans, reads, lookups, transactions; `LookupTable`."""
