"""A table's files to rows: formats, what of a file is read, and what of it was deleted."""
