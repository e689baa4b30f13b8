"""`spare checkpoint export` and `import`: weights of Hugging Face and of Megatron-LM."""
