"""As much of CuPy as a binding takes before anything is done with it, for machines without CuPy or a GPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any


class CUDARuntimeError(RuntimeError):
    """CuPy's, as far as it is read: its text names the status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: said by the driver")


class Cupy(ModuleType):
    """As much of CuPy as a binding takes before anything is done with it; its queries return `status`, as CuPy's do."""

    def __init__(self, available: bool) -> None:
        super().__init__("cupy")
        self.nccl = SimpleNamespace(available=available)
        self.status = 0
        runtime = SimpleNamespace(
            deviceSynchronize=None,
            getDevice=lambda: 0,
            setDevice=lambda device: None,
            CUDARuntimeError=CUDARuntimeError,
            eventQuery=lambda ptr: self.status,
            streamQuery=lambda ptr: self.status,
            streamIsCapturing=lambda ptr: False,
        )

        class Queried:
            ptr = 1

            def __init__(self, **kinds: bool) -> None:
                self.kinds = kinds

            @property
            def done(self) -> bool:
                return fake.status == 0

        fake = self
        self.cuda = SimpleNamespace(
            nccl=self.nccl, get_current_stream=None, runtime=runtime, Stream=Queried, Event=Queried
        )


class StreamedCupy(ModuleType):
    """CuPy's current device and streams, as far as a stream is made current."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.device = 0
        self.address = 0
        """Of the current stream."""
        self.entered: list[Any] = []
        """(address, current device) of each stream that was entered, and "left"."""
        entered, fake = self.entered, self

        class Stream:
            def __init__(self, ptr: int, device_id: int = -1) -> None:
                self.ptr, self.device_id = ptr, device_id

            @classmethod
            def from_external(cls, owner: Any) -> Stream:
                return cls(owner.__cuda_stream__()[1])

            def __enter__(self) -> Stream:
                entered.append((self.ptr, fake.device))
                return self

            def __exit__(self, *exc: object) -> None:
                entered.append("left")

        Stream.null = Stream(0)  # type: ignore[attr-defined]
        runtime = SimpleNamespace(
            getDevice=lambda: self.device, setDevice=lambda device: setattr(self, "device", device)
        )
        self.cuda = SimpleNamespace(
            Stream=Stream,
            runtime=runtime,
            Device=lambda number: SimpleNamespace(id=number, attributes={"MultiProcessorCount": 1}),
            get_current_stream=lambda device: Stream(self.address, device),
        )
