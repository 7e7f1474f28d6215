"""The way of a batch from the ring into the memory of a GPU."""

from hsloader.device.driver import CudaDriver, Driver
from hsloader.device.packing import part_of
from hsloader.device.transfers import Parcel, SpanPlan, Transfers, add_noise

__all__ = ["CudaDriver", "Driver", "Parcel", "SpanPlan", "Transfers", "add_noise", "part_of"]
