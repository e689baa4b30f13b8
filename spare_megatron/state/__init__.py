"""A rank's state outside its training, and how far the rank has come."""
