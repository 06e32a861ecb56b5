"""Reading calls to a store: its exceptions turned into ours, and asked again where it did not answer.

Reading twice harms nobody, so one lost connection in a run of hours need not end it. Writing is another matter: what
becomes of a commit whose answer got lost is decided in `storage`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import fsspec
import tenacity

from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.extras import how_to_install_driver

ATTEMPTS: Final = 4
_FIRST_PAUSE_S = 0.2
# Packages whose exceptions mean "the store did not answer", though they are no OSError.
_CLIENT_PACKAGES = frozenset({"aiobotocore", "aiohttp", "asyncio", "azure", "botocore", "gcsfs", "google", "s3fs"})
# Drivers that ask again by themselves, for some ten seconds; and memory and local disks, which will not do better.
_FINAL_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "adl", "az", "file", "local", "memory"})

_Answer = TypeVar("_Answer")


@contextmanager
def map_exceptions(action: str, location: str) -> Iterator[None]:
    """Turn a store's exceptions into ours; `action` and `location` say what was tried, on what.

    Raises:
        NotFoundError: nothing is at `location`.
        ConfigError: the store refuses: credentials or permissions.
        UnavailableError: any other failure of the store or of the way to it.
    """
    try:
        yield
    except FileExistsError:
        raise
    except NotADirectoryError as error:
        raise ConfigError(f"cannot {action} {location}: a part of the path is a file, not a folder") from error
    except FileNotFoundError as error:
        raise NotFoundError(f"cannot {action} {location}: nothing is there") from error
    except PermissionError as error:
        raise ConfigError(f"cannot {action} {location}: not allowed ({error}); check the credentials") from error
    except (OSError, TimeoutError) as error:
        raise UnavailableError(f"cannot {action} {location}: {error}") from error
    except ImportError as error:
        raise ConfigError(
            f"cannot {action} {location}: its driver is missing ({error}): {how_to_install_driver(location)}"
        ) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENT_PACKAGES:
            raise
        raise UnavailableError(f"cannot {action} {location}: {type(error).__name__}: {error}") from error


def pause_s(num_failures: int) -> float:
    """Return how long to leave a store alone after so many failures in a row, in seconds."""
    # Drawn at random: of many that were cut off together not all come back together.
    return _FIRST_PAUSE_S * 2.0 ** (num_failures - 1) + random.uniform(0, _FIRST_PAUSE_S)  # noqa: S311


def with_retries(
    file_system: fsspec.AbstractFileSystem, action: str, location: str, question: Callable[[], _Answer]
) -> _Answer:
    """Return what a reading call gives; a store that does not answer is asked up to 4 times, over a second or two.

    Args:
        file_system: that `question` asks. Drivers that ask again by themselves are called once.
        action: what is tried, for messages.
        location: on what.
        question: the call; it changes nothing.

    Raises:
        NotFoundError, ConfigError, UnavailableError: as `map_exceptions`.
    """

    def once() -> _Answer:
        with map_exceptions(action, location):
            return question()

    protocol = file_system.protocol
    if _FINAL_PROTOCOLS.intersection((protocol,) if isinstance(protocol, str) else protocol):
        return once()
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(UnavailableError),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=lambda state: pause_s(state.attempt_number),
        reraise=True,
    )
    return retrying(once)
