"""The same plan executed otherwise: on torch's own engine, or as a rehearsal that computes nothing."""
