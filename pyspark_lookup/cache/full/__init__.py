"""The full cache: a decoded, indexed copy of a version on the host's disk, shared by all its processes."""
