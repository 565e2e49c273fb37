"""A stand-in for torchvision, for scripts whose data set cannot be downloaded."""
