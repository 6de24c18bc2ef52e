"""One machine for all readers: random table histories, after each step of which every way to read gives what a plain reader gives."""
