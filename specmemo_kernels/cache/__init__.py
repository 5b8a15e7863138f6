"""The paged KV cache: storage, pages and block tables, prefix reuse."""
