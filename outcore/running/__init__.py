"""Schedule + the user's step -> the same step in less memory."""
