"""Tensor parallel: ranks, the divided vocabulary, whole KV heads."""
