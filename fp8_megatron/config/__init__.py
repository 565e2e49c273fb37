"""The configuration: fields, files and flags, checks."""
