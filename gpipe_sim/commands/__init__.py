"""The commands of `gpipe`, one file each; `gpipe_sim.cli` puts them together."""
