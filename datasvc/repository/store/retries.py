"""Conversion of a store's exceptions to those of `datasvc.errors`, and retries of reads.

Reads are idempotent, so a lost connection does not have to end a run of hours. Writes are not retried here: `storage`
handles a commit whose response was lost.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from datasvc.errors import ConfigError, MissingPackageError, NotFoundError, UnavailableError
from datasvc.extras import how_to_install_driver
from datasvc.repository.store.redaction import redact_text, safe_cause

if TYPE_CHECKING:
    import fsspec

ATTEMPTS: Final = 4
FIRST_PAUSE_S = 0.2
# Packages whose exceptions mean that the store failed, although they are not OSError.
_CLIENT_PACKAGES = frozenset({"aiobotocore", "aiohttp", "asyncio", "azure", "botocore", "gcsfs", "google", "s3fs"})
# Drivers of these protocols retry by themselves for some ten seconds. For memory and local disks, no retry helps.
_NO_RETRY_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "adl", "az", "file", "local", "memory"})
_WRONG_PATH: Final = frozenset({errno.ELOOP, errno.ENAMETOOLONG})
_Result = TypeVar("_Result")


@contextmanager
def map_exceptions(action: str, location: str) -> Iterator[None]:
    """Convert the exceptions of a store to those of `datasvc.errors`.

    The messages contain no secrets of URLs. An exception that contains one is not kept as the cause. `action` and
    `location` are the verb, such as "read", and its object, for messages.

    Raises:
        NotFoundError: `location` does not exist.
        ConfigError: the store denies access, its driver is missing, or the path is a loop of links or too long.
        UnavailableError: any other failure of the store or the network.
    """
    try:
        yield
    except (FileExistsError, MissingPackageError):
        raise  # the expected outcome of a create-only write; and an error that says already what is missing
    except NotADirectoryError as error:
        raise ConfigError(f"cannot {action} {location}: a part of the path is a file, not a folder") from error
    except FileNotFoundError as error:
        # The Hub does not tell a private repository from one that does not exist.
        advice = ", or it is private: set HF_TOKEN" if location.startswith("hf://") else ""
        raise NotFoundError(f"cannot {action} {location}: it does not exist{advice}") from safe_cause(error)
    except PermissionError as error:
        advice = "check the credentials" if "://" in location else _advise_on_access(error, location)
        text = f"cannot {action} {location}: access denied ({redact_text(str(error))}); {advice}"
        raise ConfigError(text) from safe_cause(error)
    except OSError as error:
        if error.errno in _WRONG_PATH:  # no later attempt can succeed
            raise ConfigError(
                f"cannot {action} {location}: {os.strerror(error.errno).lower()}; give another path"
            ) from safe_cause(error)
        raise UnavailableError(f"cannot {action} {location}: {redact_text(str(error))}") from safe_cause(error)
    except ImportError as error:
        raise ConfigError(
            f"cannot {action} {location}: its driver is missing ({error}): {how_to_install_driver(location)}"
        ) from error
    except Exception as error:
        # Only exceptions of the stores' clients are converted; any other one is a bug.
        if type(error).__module__.partition(".")[0] not in _CLIENT_PACKAGES:
            raise
        text = f"cannot {action} {location}: {type(error).__name__}: {redact_text(str(error))}"
        raise UnavailableError(text) from safe_cause(error)


def _advise_on_access(error: PermissionError, location: str) -> str:
    """Return advice that names the file or folder of this machine whose permissions probably deny the access."""
    path = Path(str(error.filename or location))
    # Use os.path: `Path.is_dir` and `Path.exists` raise PermissionError too.
    folders = [folder for folder in reversed(path.parents) if os.path.isdir(folder)]
    denying = next((folder for folder in folders if not os.access(folder, os.X_OK)), None)
    if denying is None and os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK):
        denying = path
    # A file is created, replaced and deleted with the permissions of its folder.
    return f"check the permissions of {denying or path.parent}"


def pause_s(num_failures: int) -> float:
    """Return the pause in seconds after a number of consecutive failures."""
    # With random jitter, so that clients that fail at the same time do not all retry at the same time.
    return FIRST_PAUSE_S * 2.0 ** (num_failures - 1) + random.uniform(0, FIRST_PAUSE_S)  # noqa: S311


def with_retries(
    file_system: fsspec.AbstractFileSystem, action: str, location: str, read: Callable[[], _Result]
) -> _Result:
    """Return the result of `read`; retry it if the store does not respond, up to 4 attempts in a second or two.

    `read` must not change anything. It is called once if the driver of `file_system` has retries of its own. `action`
    and `location` are the verb and its object, for messages. For errors, see `map_exceptions`.
    """

    def once() -> _Result:
        # The exceptions are converted in each attempt, so that only an UnavailableError is retried.
        with map_exceptions(action, location):
            return read()

    protocol = file_system.protocol
    if _NO_RETRY_PROTOCOLS.intersection((protocol,) if isinstance(protocol, str) else protocol):
        return once()
    import tenacity  # used for remote stores alone

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(UnavailableError),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=lambda state: pause_s(state.attempt_number),
        reraise=True,
    )
    return retrying(once)
