"""What a training step of GPT-2 needs of memory and time, with each feature that saves memory."""
