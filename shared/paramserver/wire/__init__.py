"""Wire formats: frames, tensors, HTTP/2, and parsers whose allocations are bounded."""
