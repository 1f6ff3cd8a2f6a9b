"""Files and mixtures of files: from paths to records."""
