"""Models and GPUs: the KV size of a model, the catalog, and the rates a GPU should reach."""
