"""Tables of other systems: makes a provider from the options, limits the time of its calls, repeats failed ones and checks their rows."""
