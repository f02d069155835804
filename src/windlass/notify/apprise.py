"""Sends messages to any service that Apprise supports, by one Apprise URL. Needs the extra windlass[apprise].

Apprise is synchronous and has limits of its own for each step (4 s to connect, 4 s to read). It runs in the thread of
this notifier, and DEADLINE_S covers the whole delivery. Its log lines and errors may repeat the URL, which is a secret:
they are discarded, and errors here name the service only.
"""

import logging
from importlib import import_module
from typing import Any

from windlass.model.alert import Message, MessageKind, Severity
from windlass.model.errors import ConfigError, NotDelivered
from windlass.notify.message_content import to_sentences
from windlass.notify.thread_runner import SingleThreadRunner

DEADLINE_S = 30.0
_TYPES = {Severity.WARNING: "warning", Severity.CRITICAL: "failure"}


class AppriseNotifier:
    """`position`: of the URL in the setting, from 1. It names the notifier, since the URL may not."""

    def __init__(self, url: str, position: int) -> None:
        """Raises ConfigError if Apprise is not installed or does not know the URL."""
        try:
            apprise: Any = import_module("apprise")
        except ImportError:
            raise ConfigError(
                "alerts.apprise_urls is set, but Apprise is not installed. Run pip install 'windlass[apprise]'."
            ) from None
        log = logging.getLogger("apprise")
        log.propagate, log.disabled = False, True
        self.name = f"apprise-{position}"
        self._service = apprise.Apprise.instantiate(url)
        if self._service is None:
            raise ConfigError(
                f"URL {position} of alerts.apprise_urls is not one that Apprise {apprise.__version__} knows: "
                "compare it with the page of its service in Apprise's documentation."
            )
        self._thread = SingleThreadRunner(self.name)

    async def send(self, message: Message) -> None:
        kind = "success" if message.kind is MessageKind.RESOLVED else _TYPES[message.severity]

        def deliver() -> bool:
            title, body = f"windlass {message.title}", to_sentences(message)
            return bool(self._service.notify(body=body, title=title, notify_type=kind))

        try:
            is_delivered = await self._thread.call(deliver, DEADLINE_S)
        except TimeoutError:
            raise NotDelivered(f"{self.name} did not answer within {DEADLINE_S:g} s") from None
        except Exception as error:
            # A plugin may raise anything, and its text may repeat the URL.
            raise NotDelivered(f"{self.name} failed ({type(error).__name__})") from None
        if not is_delivered:
            raise NotDelivered(f"{self.name} did not accept it")
