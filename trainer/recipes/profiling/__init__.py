"""Measures where the time of a training step is spent; `datasvc.planning.prediction` predicts it for other clusters.

`measure/` determines the costs of a step by running steps. `command` is `python -m datasvc.trainer profile`.
"""
