"""Sinks of metrics: files, TensorBoard, Weights & Biases, Prometheus."""
