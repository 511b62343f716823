"""Images for calibration and for reporting: sources, each model's preprocessing, fingerprints. Light: no torch."""
