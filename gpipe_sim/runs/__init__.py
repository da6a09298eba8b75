"""Executed plans: the run directory, predicted beside measured, and how right all runs were."""
