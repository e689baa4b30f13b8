"""Training in virtual time: the controller itself, driven against a cost model and random losses."""
