"""Groups of KV caches: which blocks of each group a hit needs, and which are worth keeping."""
