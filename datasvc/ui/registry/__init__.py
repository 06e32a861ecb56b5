"""The registry over HTTP: read-only routes below `/v1` with stable paths and fields, and their OpenAPI document."""
