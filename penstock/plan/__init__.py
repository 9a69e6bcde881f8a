"""Before buying: how much KV a model makes, and whether keeping it pays."""
