"""Decides and drives: the scheduler, the step, and the driver that repeats it."""
