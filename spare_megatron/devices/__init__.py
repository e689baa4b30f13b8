"""GPUs in torch: streams, host memory, libraries. This room and `machine.gpus`, without torch, alone name CUDA."""
