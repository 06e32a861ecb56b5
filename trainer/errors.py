"""The one error that users of the trainer may want to catch.

Misuse that only concerns the calling process (a bad argument, a name still in flight, no ``init``) is a
``ValueError``. Everything that concerns the job as a whole is a ``HorovodInternalError``.
"""


class HorovodInternalError(RuntimeError):
    """An operation failed for the job: ranks disagree about it, or a rank has left, died or is out of reach.

    After a disagreement the trainer stays usable. After the loss of a rank every further operation raises
    this error until ``shutdown()`` and ``init()``.
    """
