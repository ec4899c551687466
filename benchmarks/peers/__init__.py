"""Engines to compare with: one file each, listed in registry.py."""
