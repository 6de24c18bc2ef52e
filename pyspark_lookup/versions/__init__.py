"""Tables: their files, partitions and versions, and which version is current."""
