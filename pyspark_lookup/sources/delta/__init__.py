"""Delta Lake tables. This package reads their log itself, as the protocol's PROTOCOL.md describes it, without another library."""
