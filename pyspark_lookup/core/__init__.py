"""What all other packages use: errors, clocks, metrics, threads, and checks of decoded values."""
