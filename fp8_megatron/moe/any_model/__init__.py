"""Experts of other libraries' models."""
