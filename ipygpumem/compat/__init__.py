"""Other tools' interfaces over our engine: a notebook that was written for one runs with another import."""
