"""Where the time of a training step goes, and where it would go on other machines.

`costs` says what is known of a step, `step_time` what follows from it (Shi et al. 2018, arXiv:1711.05979), `predict`
and `simulate` what would follow elsewhere; all four are pure. `measure`, `layers` and `messages` find the costs by
running steps, and `command` is `python -m datasvc.trainer profile`.
"""
