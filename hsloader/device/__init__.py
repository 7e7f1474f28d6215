"""The way of a batch from the ring into the memory of a GPU."""
