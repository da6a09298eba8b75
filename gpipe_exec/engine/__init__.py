"""What executes a plan on one rank."""
