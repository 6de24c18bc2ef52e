"""What a process does with a table that a path and options name: plans reads, reads rows, looks rows up by key, writes, and `LookupTable`."""
