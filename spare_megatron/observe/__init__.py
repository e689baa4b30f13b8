"""Sinks of metrics: files, TensorBoard, Weights & Biases, a port."""
