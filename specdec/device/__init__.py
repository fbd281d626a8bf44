"""What the device does without the host: recorded functions, transfers, the one read."""

from specdec.device.transfer import array_on, fetched, moved, sent, sync_allowed, to_device

__all__ = ["array_on", "fetched", "moved", "sent", "sync_allowed", "to_device"]
