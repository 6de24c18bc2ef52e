"""Tables of plain files: a file, a directory, or the files that match a glob."""
