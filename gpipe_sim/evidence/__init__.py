"""Published figures beside the predictions."""
