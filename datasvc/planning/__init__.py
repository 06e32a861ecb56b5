"""Plans a run before it starts: traffic and cost of its caches, memory and time of its steps. Pure.

`run_plan` forecasts what a run reads from caches, peers and the origin (`cache`, `replay`), and what that costs
(`cost`). `ranking` compares the layouts of a cluster by `memory` and `layout_step`. `prediction` predicts a measured
step (`step`) on another cluster. `cluster` has links and the time of collectives, which both models of a step use.
"""
