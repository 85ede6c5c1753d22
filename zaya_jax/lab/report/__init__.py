"""The results of a machine as one HTML page."""
