"""What models and GPUs are: KV bytes of a model, the catalog, the rates a GPU should reach."""
