"""Profiles: layers, links and the engine's own overhead, measured."""
