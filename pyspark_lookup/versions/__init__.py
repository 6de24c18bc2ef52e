"""Tables: their files, partitions and versions, and how the current version is found."""
