"""Measures where the time of a training step is spent, and predicts it for other clusters.

`measure/` determines the costs of a step by running steps. `predict/` is pure: `step_time` computes the duration of a
step from its costs (Shi et al. 2018, arXiv:1711.05979), `predict` and `simulate` apply it to other clusters.
`command` is `python -m datasvc.trainer profile`.
"""
