"""Draft trees: their shape, their acceptance, and how much of one pays."""
