"""What goes with cells and can be left out: trends, subscribers."""
