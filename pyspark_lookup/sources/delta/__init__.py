"""Delta Lake tables, read from their log (as the protocol's PROTOCOL.md says) without another library."""
