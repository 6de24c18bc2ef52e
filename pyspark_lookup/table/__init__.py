"""What a table is: its files, partitions and versions, and which version is current."""
