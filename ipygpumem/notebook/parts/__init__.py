"""What goes with cells and can be left out: the live line, trends, the flight recorder, subscribers."""
