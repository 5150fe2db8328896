"""Searches schedule by schedule: copies come and go, each priced by what it touches."""
