"""Notifiers: webhook, Slack, e-mail and command. ports/alerts.py is their contract."""
