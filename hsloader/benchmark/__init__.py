"""Measures disk, decoding, pipeline, transfer and the stock way on the machine at hand, and says what bounds a run."""
