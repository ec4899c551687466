"""Offline batches: files of lines, answered in order and resumed where they ended (docs/batch.md).

This package reads, runs and writes lines, and answers those of its own form by a pipeline. Lines in
OpenAI's form are answered by allspark.serve.batches, which is built on it.
"""
