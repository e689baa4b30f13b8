"""Where the numbers of a run go while it trains: a file of JSON lines, TensorBoard, Weights & Biases."""
