"""Planning before buying: whether offloading helps, and how fast this machine's links are."""
