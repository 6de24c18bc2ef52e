"""Reads rows of a table's files: decodes the file formats, leaves out the parts of files without matching rows, and drops deleted rows."""
