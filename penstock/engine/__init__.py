"""The embedded engine: runs a real model whose KV is kept in tiers."""
