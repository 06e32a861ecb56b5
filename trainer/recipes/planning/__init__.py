"""Estimates memory and step time of the layouts of a training run, and ranks them.

`model_costs` describes a model, `memory` and `step_time` estimate one candidate, `ranking` compares all candidates of
`enumerate`. These are pure. `command` is the command line.
"""
