"""Access to IPython's outputs, stored errors and cell sources, and the rewriting of cells."""
