"""Routing, products, formats, slabs, signals. Only routing_slots stores to peers; the others access only this GPU."""
