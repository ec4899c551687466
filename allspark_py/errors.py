"""Exceptions of the package. Calls that the DashInfer interface documents as returning AsStatus do
not raise them; they keep the message for `Engine.last_error()`."""

from __future__ import annotations


class AllSparkError(RuntimeError):
    """A failure that has no more specific built-in exception."""


class OutOfMemoryError(AllSparkError, MemoryError):
    """A memory pool or the machine cannot hold what was asked for."""
