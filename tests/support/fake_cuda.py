from .cuda.device import FakeCuda as FakeCuda
from .cuda.device import FakeEvent as FakeEvent
