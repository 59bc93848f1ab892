"""Reports as one HTML page that stands alone: what a demo or a benchmark found, for a browser."""
