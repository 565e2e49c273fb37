"""The elementwise halves of Muon's step over flat state: momentum in, and masters out."""
