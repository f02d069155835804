"""Receivers of messages: a webhook, Slack and its like, e-mail, a command. ports/alerts.py is their contract."""
