"""Who is to be told what is the matter."""

from typing import TYPE_CHECKING

from windlass.model.config import Config

if TYPE_CHECKING:
    from windlass.ports.alerts import Notifier

    pass


def notifiers(config: Config) -> "list[Notifier]":
    """Everybody who is to be told what is the matter."""
    from windlass.config_loader import secret_variables
    from windlass.notify.command import Command
    from windlass.notify.email import Email
    from windlass.notify.webhook import Slack, Webhook

    alerts, found = config.alerts, list["Notifier"]()
    if alerts.webhook_url is not None:
        found.append(Webhook(alerts.webhook_url.get_secret_value()))
    if alerts.slack_url is not None:
        found.append(Slack(alerts.slack_url.get_secret_value()))
    if alerts.email_to and alerts.smtp_url is not None:
        found.append(Email(alerts.smtp_url.get_secret_value(), alerts.email_from, alerts.email_to))
    if alerts.command is not None:
        found.append(Command(alerts.command, tuple(secret_variables())))
    return found
