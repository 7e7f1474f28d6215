"""The on-disk format: data types, frames, shards, segments, manifest, locks; knows no producer and no trainer."""
