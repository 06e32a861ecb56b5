"""The launcher: runs a program as the ranks of one data-parallel job, on this machine and on other hosts.

Start it with `python -m datasvc.trainer.launch -np 2 python train.py`; it is installed as `datasvc-run`.
"""
