"""The bodies of requests, as pydantic models: they check, and they are the OpenAPI document."""
