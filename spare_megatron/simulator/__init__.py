"""Training in virtual time, on the controller that also drives real runs.

Imports `stacking`, `core`, `config`, `journal` and `planner`.
Start with `scenario`, then `spare_run`; `calibrate` reads costs off a real run.
"""
