"""The training loop and what it shows, writes and listens to."""
