"""What a run will need: memory."""
