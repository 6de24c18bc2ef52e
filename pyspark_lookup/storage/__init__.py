"""The underlying file system (UFS), what this host keeps of it on disk, and what it publishes about itself."""
