"""What a training step will take before it is run: read from the program that XLA compiled."""
