"""Turns a plan into edits and applies them, to a graph being traced or to one in a file."""
