"""How bytes travel between the GPUs of a node."""
