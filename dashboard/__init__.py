"""Charts and reports of predictions: figures drawn once, for the HTML report and, later, for the page."""
