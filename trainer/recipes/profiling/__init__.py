"""Measures where the time of a training step is spent, and predicts it for other machines.

`predict/` is pure: `costs` describes a step, `step_time` computes its duration (Shi et al. 2018, arXiv:1711.05979),
`predict` and `simulate` apply it to other clusters. `measure/` determines the costs by running steps. `command` is
`python -m datasvc.trainer profile`.
"""
