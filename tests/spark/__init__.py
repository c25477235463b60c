"""Tests with real executors."""
