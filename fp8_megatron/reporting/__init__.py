"""Metrics, plots, profiles."""
