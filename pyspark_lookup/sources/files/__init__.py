"""Tables that are nothing but files: a file, a directory, or a glob."""
