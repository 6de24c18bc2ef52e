"""What every other package needs and no other project has: errors, clocks, metrics, checks of what was decoded."""
