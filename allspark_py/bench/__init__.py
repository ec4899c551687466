"""Measures models in this process, and servers of OpenAI's protocol (docs/bench.md).

workload.py and dataset.py make the requests, and say when they are due. load.py sends them to a
target, a model in this process (engine_target.py) or a server (openai_target.py, over
connection.py), and notes what came when. metrics.py makes figures of that, report.py and plot.py
show them.
"""
