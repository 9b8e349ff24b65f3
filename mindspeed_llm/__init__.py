"""What is trained: arguments, models, data, the training loop and inference. How it is sharded and in which precision
lives in `fsdp2`."""
