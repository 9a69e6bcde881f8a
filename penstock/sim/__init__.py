"""Tomorrow's traffic on hardware not yet bought: the books that serve, with a clock of our own."""
