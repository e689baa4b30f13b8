"""`spare simulate`: training in virtual time, on the controller that also drives real runs.

Start with `scenario`, then `spare_run`; `calibrate` reads costs off a real run.
"""
