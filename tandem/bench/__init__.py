"""Measurements, with the theoretical bound printed beside each."""
