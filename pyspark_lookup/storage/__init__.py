"""The underlying file system (UFS), this host's cache directory, and the counters that it publishes."""
