"""The processes of a run: how they are started, what they are told, what they tell, what a rank shows of itself."""
