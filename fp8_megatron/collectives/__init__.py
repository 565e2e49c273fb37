"""FP8 collectives: one function and one handle each."""
