"""Delta Lake tables, read by their log (the protocol's PROTOCOL.md) without another library."""
