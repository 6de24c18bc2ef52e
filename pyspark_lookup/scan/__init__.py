"""Reads rows of a table's files: the formats, which parts of a file are read, and which rows are deleted."""
