"""What a running server shows of itself: numbers in, a view of them out."""
