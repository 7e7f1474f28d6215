"""The reading side: feeder process, ring of batch slots, read modes; knows no trainer and no epoch."""
