"""JSON schemas of the resources that Kubernetes itself does not have: of the fields that our manifests use.

Written after the types of the projects: `JobSetSpec`, `ReplicatedJob`, `Network` and `FailurePolicy` of
kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go; `PodMonitorSpec`, `PodMetricsEndpoint`,
`SafeAuthorization` and `PrometheusRuleSpec` of prometheus-operator/prometheus-operator, pkg/apis/monitoring/v1. A
field that is not here is an error: look up its name and type there first.
"""

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required=(), **properties):
    """Return the schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def resource(version, kind, spec):
    metadata = fields(["name"], name=NAME, namespace=NAME, labels=TEXTS, annotations=TEXTS)
    required = ["apiVersion", "kind", "metadata", "spec"]
    return fields(required, apiVersion={"const": version}, kind={"const": kind}, metadata=metadata, spec=spec)


# A Job in a JobSet; its `spec` has the schema of batch/v1, against which the test checks the whole Job.
JOB_TEMPLATE = fields(["spec"], metadata=fields(labels=TEXTS, annotations=TEXTS), spec={"type": "object"})
JOB_SET = resource(
    "jobset.x-k8s.io/v1alpha2",
    "JobSet",
    fields(
        replicatedJobs={
            "type": "array",
            "items": fields(["name", "template"], name=NAME, replicas=COUNT, template=JOB_TEMPLATE),
        },
        network=fields(
            enableDNSHostnames={"type": "boolean"},
            subdomain=NAME,
            publishNotReadyAddresses={"type": "boolean"},
        ),
        failurePolicy=fields(
            maxRestarts=COUNT,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
            rules={
                "type": "array",
                "items": fields(
                    ["action"],
                    name=NAME,
                    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
                    onJobFailureReasons={"type": "array", "items": {"type": "string"}},
                    targetReplicatedJobs={"type": "array", "items": NAME},
                ),
            },
        ),
        suspend={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
    ),
)
POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    fields(
        ["selector", "podMetricsEndpoints"],
        selector=fields(matchLabels=TEXTS),
        podMetricsEndpoints={
            "type": "array",
            "items": fields(
                port={"type": "string"},
                path={"type": "string"},
                scheme={"enum": ["http", "https", "HTTP", "HTTPS"]},
                interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                authorization=fields(
                    type={"type": "string"},
                    credentials=fields(["key"], name=NAME, key={"type": "string"}, optional={"type": "boolean"}),
                ),
            ),
        },
    ),
)
RULE = fields(
    ["expr"],
    alert={"type": "string"},
    expr={"type": "string"},
    labels=TEXTS,
    annotations=TEXTS,
    **{"for": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h|d)$"}},
)
PROMETHEUS_RULE = resource(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    fields(
        groups={
            "type": "array",
            "items": fields(["name"], name={"type": "string"}, rules={"type": "array", "items": RULE}),
        }
    ),
)
SCHEMAS = {"JobSet": JOB_SET, "PodMonitor": POD_MONITOR, "PrometheusRule": PROMETHEUS_RULE}
