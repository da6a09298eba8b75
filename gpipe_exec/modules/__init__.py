"""Any module as a sequence of layers that a pipeline can cut."""
