"""transformers: ``patch``, ``generate``, batches and chat."""
