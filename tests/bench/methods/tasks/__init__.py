"""What students learn: models, data and what is held out, all made here."""
