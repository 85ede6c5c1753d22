"""Conversations and chat templates."""
