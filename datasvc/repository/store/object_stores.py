"""Which buckets obstore reads and writes, and how: the planner `choose_bucket`, and the clients of a bucket.

obstore is used where it does what the driver of fsspec would do: the URL has no credentials or options, fsspec is not
configured for the scheme, and the credentials are of a kind that both take. Everything else stays with fsspec.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from datasvc.errors import ConfigError
from datasvc.repository.store.redaction import redact_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

Kind = Literal["s3", "azure", "google"]

SCHEMES: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("abfs", "abfss", "az"), "azure"),
    **dict.fromkeys(("gs", "gcs"), "google"),
}
_GCLOUD_CREDENTIALS: Final = Path("~/.config/gcloud/application_default_credentials.json")
# Types of files with credentials of Google, and obstore's setting that reads each.
_GOOGLE_CREDENTIALS: Final = {"service_account": "service_account", "authorized_user": "application_credentials"}
_AZURE_HOSTS: Final = (".dfs.core.windows.net", ".blob.core.windows.net")
# Beginnings of the names of variables that clients of stores read.
_READ_BY_CLIENTS: Final = (
    *("AWS_", "AZURE_", "GOOGLE_", "GCLOUD_", "STORAGE_", "CLOUDSDK_", "DATASVC_", "HOME", "SSL_"),
    *("HTTP", "http", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"),
)
# botocore renews credentials that expire sooner than this by itself.
_CREDENTIALS_LAST: Final = timedelta(minutes=5)
_FIND_REGION_TIMEOUT_S: Final = 60
_UNLIMITED: Final = timedelta(days=30)  # the limit of a whole request cannot be turned off
# Servers close idle connections, some after 5 s.
_IDLE: Final = timedelta(seconds=4)


@dataclass(frozen=True)
class ObjectBucket:
    """A bucket, or a container of Azure, that obstore can reach.

    Attributes:
        prefix: path of the root in it, without slashes at its ends; may be empty.
        config: settings of obstore's store. It reads others, and most credentials, from the environment.
        credentials: botocore's credentials, which it renews; None: obstore finds them by itself.
    """

    kind: Kind
    name: str
    prefix: str
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)  # may contain keys
    credentials: Any = field(default=None, repr=False)

    @property
    def allows_http(self) -> bool:
        """Whether requests without TLS are allowed: the user has set such an endpoint."""
        # That of Google is in the file with the credentials, if there is one.
        return self.kind == "google" or str(self.config.get("endpoint", "")).startswith("http://")


def choose_bucket(url: str, environ: Mapping[str, str] = os.environ) -> ObjectBucket | str:
    """Return how obstore reaches the bucket of `url`, or the reason why fsspec's driver must be used, as a phrase.

    Raises:
        ConfigError: the AWS profile cannot be read.
    """
    scheme, separator, _ = url.partition("://")
    kind = SCHEMES.get(scheme)
    if kind is None or not separator or "::" in url:
        return "obstore does not read this kind of URL"
    if environ.get("DATASVC_STORE_CLIENT") == "fsspec":
        return "DATASVC_STORE_CLIENT is set to fsspec"
    from fsspec.config import conf

    if any(conf.get(each) for each, of in SCHEMES.items() if of == kind):
        return f"fsspec is configured for {scheme}://"
    parts = urlsplit(url)
    if redact_url(url) != url or parts.fragment:
        return "the URL has credentials or options"
    prefix = parts.path.strip("/")
    if any(name in {"", ".", ".."} for name in prefix.split("/")) and prefix:
        return "the path has empty names"
    if kind == "s3":
        return _choose_s3(parts.netloc, prefix, environ)
    if kind == "azure":
        return _choose_azure(parts.netloc, prefix, environ)
    return _choose_google(parts.netloc, prefix, environ)


def read_settings() -> Hashable:
    """Return a value that changes with what clients read of the environment, and with the files of AWS that it names.

    What was opened with other settings must not be used again. Other variables do not count: packages set some.
    """
    files = (
        Path(os.environ.get(name) or default).expanduser()
        for name, default in (
            ("AWS_CONFIG_FILE", "~/.aws/config"),
            ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        )
    )
    states = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()]
    read = frozenset((name, value) for name, value in os.environ.items() if name.startswith(_READ_BY_CLIENTS))
    return read, tuple(states)


# Held while a session is opened and finds its credentials: otherwise threads that start together would each do so.
# Reentrant: what finds them may fork.
_session_lock: Final = threading.RLock()
os.register_at_fork(
    before=_session_lock.acquire, after_in_parent=_session_lock.release, after_in_child=_session_lock.release
)


@lru_cache(maxsize=8)
def _open_session(_settings: Hashable) -> Any:
    """Return botocore's session, which keeps credentials until they expire: a role is assumed once, not per store."""
    return importlib.import_module("botocore.session").Session()


def open_bucket(bucket: ObjectBucket, client_options: ClientConfig, retry_config: RetryConfig) -> ObjectStore:
    """Return a client of a bucket."""
    from obstore import store

    # Checked by obstore at run time; the types of its settings are not importable.
    options: dict[str, Any] = {
        "config": dict(bucket.config),
        "client_options": client_options,
        "retry_config": retry_config,
    }
    if bucket.kind == "s3":
        if bucket.credentials is not None:
            options["credential_provider"] = _BotocoreCredentials(bucket.credentials)
        return store.S3Store(bucket.name, **options)
    if bucket.kind == "azure":
        return store.AzureStore(bucket.name, **options)
    return store.GCSStore(bucket.name, **options)


def move_to_region(bucket: ObjectBucket) -> ObjectBucket:
    """Return a bucket of S3 with the region that it is in, which S3 tells everyone.

    Raises:
        ConfigError: the server does not name another region.
        OSError: the server does not respond.
    """
    import ssl
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    known = str(bucket.config["region"])
    endpoint = bucket.config.get("endpoint", f"https://s3.{known}.amazonaws.com")
    request = Request(f"{endpoint}/{bucket.name}", method="HEAD")  # noqa: S310
    context = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
    try:
        with urlopen(request, timeout=_FIND_REGION_TIMEOUT_S, context=context) as response:  # noqa: S310
            headers = response.headers
    except HTTPError as error:  # the request is not signed
        headers = error.headers
    region = headers.get("x-amz-bucket-region")
    if not region or region == known:
        raise ConfigError(
            f"the server says that the bucket {bucket.name} is in another region than {known}, but not in which; set "
            "AWS_REGION to its region"
        )
    return replace(bucket, config={**bucket.config, "region": region})


def make_client_options(
    *, connect_s: float, silence_s: float, allow_http: bool, headers: Mapping[str, str] | None = None
) -> ClientConfig:
    """Return the settings of obstore's HTTP client.

    `silence_s` is the time limit without a byte, and of the time until the headers of a response are complete; of an
    upload, the limit of the whole request. Without `allow_http`, all requests need TLS.

    Raises:
        ConfigError: the file that AWS_CA_BUNDLE names cannot be read.
    """
    options: dict[str, Any] = {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=connect_s),
        "read_timeout": timedelta(seconds=silence_s),
        "timeout": _UNLIMITED,
        "pool_idle_timeout": _IDLE,
        "user_agent": "datasvc",  # some servers reject requests without one
    }
    if headers:
        options["default_headers"] = dict(headers)
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        try:
            options["root_certificate"] = Path(bundle).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read the certificates that AWS_CA_BUNDLE names: {error}; set it to a file in PEM format"
            ) from error
    return options  # type: ignore[return-value]


def _choose_s3(name: str, prefix: str, environ: Mapping[str, str]) -> ObjectBucket | str:
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    has_profiles = (
        "AWS_PROFILE" in environ or Path(environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser().exists()
    )
    if environ.get("AWS_ACCESS_KEY_ID") and not has_profiles and (endpoint or region):
        return ObjectBucket("s3", name, prefix, _s3_config(endpoint, region))
    # Profiles, SSO, roles and their renewal: botocore, which s3fs uses too, finds the same credentials.
    if importlib.util.find_spec("botocore") is None:
        return "its credentials or its region are not in the environment, and botocore is not installed"
    try:
        with _session_lock:
            return _choose_by_profile(name, prefix, region)
    except importlib.import_module("botocore.exceptions").BotoCoreError as error:
        raise ConfigError(f"cannot read the AWS profile: {error}; check AWS_PROFILE and AWS_CONFIG_FILE") from error


def _choose_by_profile(name: str, prefix: str, region: str | None) -> ObjectBucket | str:
    session = _open_session(read_settings())
    profile = session.get_scoped_config()
    provider = importlib.import_module("botocore.configprovider").ConfiguredEndpointProvider
    endpoint = provider(full_config=session.full_config, scoped_config=profile, client_name="s3").provide()
    region = region or session.get_config_variable("region")
    if profile.get("s3"):
        return "the AWS profile has settings for S3"
    if not endpoint and not region:
        # botocore then asks S3 for the region of the bucket, and obstore does not.
        return "neither AWS_REGION nor an endpoint is set"
    credentials = session.get_credentials()
    if credentials is None:
        return "there are no AWS credentials"
    return ObjectBucket("s3", name, prefix, _s3_config(endpoint, region), credentials)


def _s3_config(endpoint: str | None, region: str | None) -> dict[str, str]:
    config = {"region": region or "us-east-1"}
    if endpoint:
        config["endpoint"] = endpoint.rstrip("/")
    return config


class _BotocoreCredentials:
    """Credential provider of obstore: the current credentials of botocore, which renews them before they expire."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        current = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": current.access_key,
            "secret_access_key": current.secret_key,
            "token": current.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,
        }


def _choose_azure(host: str, prefix: str, environ: Mapping[str, str]) -> ObjectBucket | str:
    container, at, account_host = host.partition("@")
    config = _parse_connection_string(environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    if at:
        account = next((account_host.removesuffix(end) for end in _AZURE_HOSTS if account_host.endswith(end)), "")
        if not account or "." in account:
            return "the URL has the address of a server"
        if config.get("account_name", account) != account:
            return "the URL has another account than AZURE_STORAGE_CONNECTION_STRING"
        config["account_name"] = account
    has_key = bool(config.keys() & {"account_key", "sas_key"}) or any(
        environ.get(name) for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN")
    )
    has_application = all(
        environ.get(f"AZURE_STORAGE_{name}") for name in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID")
    )
    if not config.get("account_name") and not environ.get("AZURE_STORAGE_ACCOUNT_NAME"):
        return "the environment has no account of Azure"
    if not has_key and not has_application:
        return "the environment has no key, token or application of Azure"
    return ObjectBucket("azure", container, prefix, config)


def _parse_connection_string(text: str) -> dict[str, str]:
    """Return obstore's settings for a connection string of Azure; {} for ""."""
    fields = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    protocol, suffix = fields.get("DefaultEndpointsProtocol", "https"), fields.get("EndpointSuffix")
    account = fields.get("AccountName", "")
    endpoint = fields.get("BlobEndpoint") or (f"{protocol}://{account}.blob.{suffix}" if suffix else "")
    config = {
        "account_name": account,
        "account_key": fields.get("AccountKey", ""),
        "sas_key": fields.get("SharedAccessSignature", ""),
        "endpoint": endpoint.rstrip("/"),
    }
    return {name: value for name, value in config.items() if value}


def _choose_google(name: str, prefix: str, environ: Mapping[str, str]) -> ObjectBucket | str:
    if environ.get("STORAGE_EMULATOR_HOST"):
        return "an emulator of Google Cloud Storage lacks the interface that obstore uses"
    path = Path(environ.get("GOOGLE_APPLICATION_CREDENTIALS") or _GCLOUD_CREDENTIALS.expanduser())
    try:
        kind = json.loads(path.read_bytes()).get("type")
    except (OSError, ValueError, AttributeError):
        return f"there are no credentials of Google in {path}"
    if kind not in _GOOGLE_CREDENTIALS:
        return f"the credentials in {path} are of the type {kind!r}"
    return ObjectBucket("google", name, prefix, {_GOOGLE_CREDENTIALS[kind]: str(path)})
