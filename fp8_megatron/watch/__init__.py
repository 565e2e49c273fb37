"""Notices dead and hanging ranks, and names them."""
