"""Draft trees: shape, acceptance estimates and the part to verify."""
