"""What a loader is made of: its settings and ranks, an epoch's batches, asking for them, handing them out."""
