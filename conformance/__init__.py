"""Referee for anybody's context parallelism: ``ringattn conformance TARGET``.

:mod:`.protocol` says how a target is described, :mod:`.cases` lists the cases, :mod:`.oracle` has the float64 truth and
the error limits, :mod:`.causes` names the cause of a wrong result, and :mod:`.ranks` runs targets in child processes.
The folder uses ``ringattn.reference`` as its truth. Nothing else of ringattn takes part in a verdict.
"""

from .protocol import Adapter, TargetCall, register

__all__ = ["Adapter", "TargetCall", "register"]
