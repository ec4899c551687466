"""Talks with servers of OpenAI's protocol: what `allspark client`, `allspark bench serve` and
LMDeploy's APIClient share. It needs the standard library alone."""
