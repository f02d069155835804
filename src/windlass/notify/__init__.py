"""Receivers of messages: a webhook, Slack and its like, e-mail, a command. ports/alarm.py is their contract."""
