"""Attacks on running jobs: strangers who know nothing, and members who hold the secret and mean harm."""
