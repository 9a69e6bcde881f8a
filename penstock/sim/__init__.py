"""Traffic on hardware you do not have: the real books and policies, with simulated time."""
