"""What all other packages use: clocks, metrics, threads, and checks of decoded values."""
