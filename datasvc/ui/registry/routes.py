"""All routes of the registry, and their responses: JSON with an ETag, errors as RFC 9457 defines them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from aiohttp import ETag, web

from datasvc.repository import Kind
from datasvc.repository.objects.objects import digest_of
from datasvc.repository.resolved import KIND_NAMES
from datasvc.ui.registry import records
from datasvc.ui.registry.names import (
    list_dataset_versions,
    list_model_versions,
    list_names,
    list_run_facts,
    list_tags,
    read_name,
    read_run_facts,
    read_tag,
    read_tag_history,
)
from datasvc.ui.registry.openapi import json_of, openapi_document
from datasvc.ui.registry.route import PAGING, RegistryRoute, RouteParameter
from datasvc.ui.registry.versions import (
    list_artefacts,
    list_objects,
    list_tensors,
    list_trained_models,
    read_dataset,
    read_model,
    read_sample_users,
    read_version_lineage,
)
from datasvc.ui.web.access import REGISTRY
from datasvc.ui.web.page import Query
from datasvc.ui.web.routes import PageRoutes
from datasvc.ui.web.site import Site

_YEAR_S: Final = 365 * 86400
_REMOVED: Final = RouteParameter(
    "removed",
    "Whether to accept a removed version, of which only the entry is certain to exist.",
    {"type": "string", "enum": ["false", "true"], "default": "false"},
)
_KEY: Final = RouteParameter("key", "Key of the sample.", {"type": "string", "minLength": 1}, is_required=True)
_NAME: Final = RouteParameter("name", "Only runs of this name.", {"type": "string"})


def _common_routes(kind: Kind) -> Iterator[RegistryRoute]:
    """Yield the routes that data sets and models have in common."""
    noun, prefix = KIND_NAMES[kind], kind.removesuffix("s")
    one = f"/{kind}/{{name}}"
    yield RegistryRoute(
        f"/{kind}", f"list_{kind}", f"All {noun}s", records.NamesPage, partial(list_names, kind), PAGING
    )
    yield RegistryRoute(one, f"read_{prefix}", f"One {noun}", records.RegisteredName, partial(read_name, kind))
    tags = f"{one}/tags"
    yield RegistryRoute(
        tags, f"list_{prefix}_tags", f"The tags of a {noun}", records.TagList, partial(list_tags, kind)
    )
    what = (
        "The version that a tag points at; `latest` is the newest version, and `TAG~1` the one before its last move"
    )
    what += ", `best:METRIC` the one with the best value" if kind == "models" else ""
    yield RegistryRoute(f"{tags}/{{tag}}", f"read_{prefix}_tag", what, records.RegisteredTag, partial(read_tag, kind))
    yield RegistryRoute(
        f"{tags}/{{tag}}/history",
        f"read_{prefix}_tag_history",
        "All moves of a tag",
        records.TagHistory,
        partial(read_tag_history, kind),
    )
    yield RegistryRoute(
        f"{one}/versions/{{version}}/objects",
        f"list_{prefix}_objects",
        f"The objects of a version of a {noun}: digests, sizes and paths",
        records.ObjectsPage,
        partial(list_objects, kind),
        (*PAGING, _REMOVED),
        is_immutable=True,
    )


ROUTES: Final = (
    *_common_routes("models"),
    RegistryRoute(
        "/models/{name}/versions",
        "list_model_versions",
        "The versions of a model, with metrics",
        records.ModelVersionsPage,
        list_model_versions,
        PAGING,
    ),
    RegistryRoute(
        "/models/{name}/versions/{version}",
        "read_model_version",
        "A version of a model",
        records.ModelDetails,
        read_model,
        (_REMOVED,),
        is_immutable=True,
    ),
    RegistryRoute(
        "/models/{name}/versions/{version}/tensors",
        "list_model_tensors",
        "The tensors of a version of a model",
        records.TensorsPage,
        list_tensors,
        (*PAGING, _REMOVED),
        is_immutable=True,
    ),
    RegistryRoute(
        "/models/{name}/versions/{version}/artefacts",
        "list_model_artefacts",
        "The artefacts of a version of a model, such as an ONNX graph, and their files",
        records.ArtefactList,
        list_artefacts,
        (_REMOVED,),
    ),
    RegistryRoute(
        "/models/{name}/versions/{version}/lineage",
        "read_model_lineage",
        "Where a version of a model comes from",
        records.LineageFacts,
        read_version_lineage,
        (_REMOVED,),
    ),
    *_common_routes("datasets"),
    RegistryRoute(
        "/datasets/{name}/versions",
        "list_dataset_versions",
        "The versions of a data set",
        records.DatasetVersionsPage,
        list_dataset_versions,
        PAGING,
    ),
    RegistryRoute(
        "/datasets/{name}/versions/{version}",
        "read_dataset_version",
        "A version of a data set",
        records.DatasetDetails,
        read_dataset,
        (_REMOVED,),
        is_immutable=True,
    ),
    RegistryRoute(
        "/datasets/{name}/versions/{version}/models",
        "list_trained_models",
        "The model versions that were trained on a version of a data set",
        records.TrainedModels,
        list_trained_models,
        (_REMOVED,),
    ),
    RegistryRoute(
        "/datasets/{name}/consumers",
        "read_sample_users",
        "The model versions that consumed a sample, in any version of the data set",
        records.SampleUsers,
        read_sample_users,
        (_KEY,),
    ),
    RegistryRoute("/runs", "list_runs", "Training runs", records.RunsPage, list_run_facts, (_NAME, *PAGING)),
    RegistryRoute("/runs/{name}/{id}", "read_run", "One training run", records.RunFacts, read_run_facts),
)


def add_registry(app: web.Application, site: Site, pages: PageRoutes) -> None:
    """Add all routes, and the one of their OpenAPI document. Errors are responses of `pages`."""
    for route in ROUTES:
        app.router.add_get(f"{REGISTRY}{route.path}", pages.handler(partial(_respond, site, route)))
    document = openapi_document(ROUTES)

    async def show_document(request: web.Request) -> web.Response:
        return _json_response(request, document, is_immutable=False)

    app.router.add_get(f"{REGISTRY}/openapi.json", show_document)


def _respond(site: Site, route: RegistryRoute, request: web.Request) -> web.Response:
    record = route.read(site, dict(request.match_info), Query(request.query))
    return _json_response(request, json_of(record), is_immutable=route.is_immutable)


def _json_response(request: web.Request, value: Any, *, is_immutable: bool) -> web.Response:
    """Return a value as JSON; without it, if the request has its ETag."""
    body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    etag = digest_of(body)[:32]
    headers = {"Cache-Control": f"private, max-age={_YEAR_S}, immutable" if is_immutable else "private, no-cache"}
    known = request.if_none_match or ()
    if any(each.value in {etag, "*"} for each in known):
        response = web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
    else:
        response = web.Response(body=body, content_type="application/json", headers=headers)
    response.etag = ETag(etag)
    return response
