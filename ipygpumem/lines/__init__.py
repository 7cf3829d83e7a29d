"""What each line of some code costs: the account, and the two ways to be told of lines."""
