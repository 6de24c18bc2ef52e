"""A stream that runs for long over an unreliable store while tables change and processes die, and a check of all it put out."""
