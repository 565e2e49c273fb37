"""Statistics of a cast to FP8: what it loses, and where its values lie."""
