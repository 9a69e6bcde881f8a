"""The embedded engine: a real model whose KV lives in tiers."""
