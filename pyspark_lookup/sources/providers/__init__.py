"""Tables of other systems: makes a provider from the options, limits the time of its calls, repeats failed calls and checks the rows."""
