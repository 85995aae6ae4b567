"""What travels: frames, tensors, and the bounded reading of both."""
