"""State that the calls of a layer share: symmetric buffers, launches, streams, status, descriptors."""
