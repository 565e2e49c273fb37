"""What each kind of model is: one folder an architecture."""
