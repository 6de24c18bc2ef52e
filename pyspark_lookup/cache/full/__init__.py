"""The full cache: all rows of a version, decoded and indexed, on the host's disk, for all processes of the host."""
