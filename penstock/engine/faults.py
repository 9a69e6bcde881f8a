"""Errors of the engine itself, caused by a defect and not by a request.

EngineFault   the request was part of a step that failed; the engine has recovered
GrammarFault  the request's own grammar reached a limit; no other request is affected
EngineLost    the engine cannot recover, for example because the GPU is gone
"""

from __future__ import annotations

from penstock.errors import PenstockError

MAX_FAULTS_IN_A_ROW = 2  # failed steps; after one more the engine gives up
MAX_REQUEUES = 2  # restarts of a request after faults, without a token in between


class EngineFault(PenstockError):
    """A step of the engine failed. The request can be retried."""

    @classmethod
    def of(cls, error: BaseException) -> EngineFault:
        """Leaves out the error's message, which may contain another user's data."""
        return cls(
            f"the engine failed in a step that computed this request ({type(error).__name__}). "
            "It has recovered; the cause is in its log. Retry the request."
        )


class GrammarFault(EngineFault):
    """The grammar of a structured answer cannot go on. The request should not be retried."""


class EngineLost(PenstockError):
    """The engine failed and could not recover."""


class TierHangs(PenstockError):
    """A copy does not end, so the memory that it touches cannot be reused."""
