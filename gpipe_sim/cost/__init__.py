"""What each layer costs: analytic, measured or imported."""
