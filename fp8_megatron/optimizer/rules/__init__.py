"""The update rules: what each optimizer stores beside a weight, and its step."""
