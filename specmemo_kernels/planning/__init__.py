"""Device and model sizes, predicted bytes and seconds, and the memory plan."""
