"""Work that takes long: searches, runs and uploads."""
