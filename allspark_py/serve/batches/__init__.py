"""Files and batches of OpenAI's protocol; docs/batch.md has their use."""
