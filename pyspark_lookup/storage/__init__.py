"""Access to the underlying file system (UFS), this host's cache directory, and the counters that the host's processes publish there."""
