"""The three implementations of every operator. They take plain tensors and never import each other."""
