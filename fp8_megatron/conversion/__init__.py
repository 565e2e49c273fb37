"""Checkpoints to and from Hugging Face, and their verification."""
