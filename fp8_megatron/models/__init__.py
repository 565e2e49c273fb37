"""GPT and its layer specs."""
