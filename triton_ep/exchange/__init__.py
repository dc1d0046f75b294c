"""The exchange of a layer, step by step: sizes and buffers, calls and their checks, descriptors, streams."""
