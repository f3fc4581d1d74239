"""Processes that begin with everything imported: forked from one that did so, once for all tests of a worker."""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
# one list for all tests, since the first of them starts the server; symbolic shapes are torch's, for gradients
PRELOADED = [
    "torch.distributed.device_mesh", "torch.fx.experimental.symbolic_shapes", "ringattn.ring",
    "ringattn.comm.watchdog.watch", "pytest",
]  # fmt: skip
FORKED.set_forkserver_preload(PRELOADED)
