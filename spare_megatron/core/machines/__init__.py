"""Machines and places: detection of losses, re-forming of broken groups, starts of groups. Pure."""
