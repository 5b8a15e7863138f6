"""Training of drafters for a frozen model (``specmemo train``)."""
