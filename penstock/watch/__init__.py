"""What a running server shows of itself, and what to change: numbers in, a view of them out."""
