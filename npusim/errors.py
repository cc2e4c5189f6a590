"""The errors of npusim: one tree, so that `except NpuSimError` catches every refusal and nothing else."""


class NpuSimError(Exception):
    """Root of everything npusim refuses. A message says what, got, the limit, and what to do."""


class ConfigError(NpuSimError, ValueError):
    """A configuration key or value that cannot hold."""


class ModelError(NpuSimError, ValueError):
    """A model that is not one npusim can run: unreadable, without GroupQueryAttention, without a KV cache."""


class InputError(NpuSimError, ValueError):
    """A tensor given to a request that has a wrong name, type, shape or content."""


class SliceError(NpuSimError, IndexError):
    """A slice that is not wholly inside its tensor."""


class CapacityError(NpuSimError, ValueError):
    """A prompt, block or step that does not fit the static sizes chosen at compile time."""


class TrimError(NpuSimError, ValueError):
    """A rewind to rows that the cache no longer holds, or to a position it never reached."""


class KVLeakError(NpuSimError):
    """The KV sanitizer saw a slot that may not be read reach an attention output.

    position is that of the row in the slot, None where the slot was never filled.
    """

    def __init__(self, message: str, *, layer: int, slot: int, position: int | None) -> None:
        super().__init__(message)
        self.layer = layer
        self.slot = slot
        self.position = position
