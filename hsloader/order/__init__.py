"""Which samples come when: epochs, split, ranks, packing, resume; pure functions without I/O."""
