"""`python -m dashboard`: the same as `gpipe dashboard`."""

from gpipe_sim.cli import main

if __name__ == "__main__":
    import sys

    main(["dashboard", *sys.argv[1:]])
