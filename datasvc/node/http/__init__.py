"""The HTTP interface of a node: routes, authentication, errors, metrics."""
