"""An iteration round by round: what a subtask does in one, and when there is no other."""
