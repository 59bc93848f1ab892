"""As much of CuPy as a binding takes before anything is done with it, for machines without CuPy or a GPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace


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
