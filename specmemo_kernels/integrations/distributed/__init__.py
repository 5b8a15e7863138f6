"""Tensor parallel: ranks, the sharded vocabulary, replicated KV heads."""
