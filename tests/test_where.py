"""`lookup.where`: what a predicate's text means, and every construct that is refused with its text."""
