"""Tables of other systems, through a user's provider: makes it from the options, limits the time of its calls, repeats failed calls and checks
the rows that they return."""
