"""Sizes that follow from the settings of the model: parameters, tensors, memory of a rank."""
