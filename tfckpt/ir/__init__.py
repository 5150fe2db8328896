"""The values that stages hand on: graphs, what they cost, schedules, edits, targets."""
