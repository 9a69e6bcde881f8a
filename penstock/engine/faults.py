"""What becomes of requests when a step of the engine fails by itself: not a refusal, a defect.

EngineFault   the request was part of a step that failed; the engine has recovered
EngineLost    the engine cannot recover, and ends: a GPU that is gone, say
"""

from __future__ import annotations

from penstock.errors import PenstockError

MAX_FAULTS_IN_A_ROW = 2  # steps: after more the engine ends
MAX_REQUEUES = 2  # of a request that was waiting or running beside others' faults


class EngineFault(PenstockError):
    """A step of the engine failed; ask again."""

    @classmethod
    def of(cls, error: BaseException) -> EngineFault:
        """Without the error's own words: they may hold what another has asked."""
        return cls(
            f"the engine failed in a step that this request was part of ({type(error).__name__}); "
            "it has recovered and serves others, and its log says where it failed: ask again."
        )


class EngineLost(PenstockError):
    """The engine failed, and could not recover."""


class TierHangs(PenstockError):
    """A copy does not end, and nothing can be done in the place it may touch."""
