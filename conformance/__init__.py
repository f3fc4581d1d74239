"""Referee for anybody's context parallelism: ``ringattn conformance TARGET``.

:mod:`.protocol` says how a target is described, and :mod:`.cases` lists the cases. :mod:`.standalone` has the truth in
float64, :mod:`.evidence` the error limits, and :mod:`.causes` names the cause of a wrong result. :mod:`.ranks` runs
targets in child processes. No attention kernel of ringattn takes part in a verdict.
"""

from .protocol import Adapter, TargetCall

__all__ = ["Adapter", "TargetCall"]
