"""The notifiers of the configuration."""

from windlass.config_sources import secret_variables
from windlass.model.config import Config
from windlass.notify.apprise import AppriseNotifier
from windlass.notify.command import CommandNotifier
from windlass.notify.email import EmailNotifier
from windlass.notify.webhook import SlackNotifier, WebhookNotifier
from windlass.ports.alerts import Notifier


def make_notifiers(config: Config) -> list[Notifier]:
    """Raises ConfigError if Apprise is needed and missing, or refuses a URL."""
    alerts = config.alerts
    notifiers: list[Notifier] = []
    if alerts.webhook_url is not None:
        notifiers.append(WebhookNotifier(alerts.webhook_url.get_secret_value()))
    if alerts.slack_url is not None:
        notifiers.append(SlackNotifier(alerts.slack_url.get_secret_value()))
    if alerts.email_to and alerts.smtp_url is not None:
        notifiers.append(EmailNotifier(alerts.smtp_url.get_secret_value(), alerts.email_from, alerts.email_to))
    if alerts.command is not None:
        notifiers.append(CommandNotifier(alerts.command, tuple(secret_variables())))
    if alerts.apprise_urls is not None:
        urls = alerts.apprise_urls.get_secret_value().split()
        notifiers += [AppriseNotifier(url, position) for position, url in enumerate(urls, start=1)]
    return notifiers
