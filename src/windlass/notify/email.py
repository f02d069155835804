"""Sends messages by e-mail, with the standard library's SMTP client in a thread."""

import smtplib
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit

from windlass.model.alert import Message, MessageKind
from windlass.model.errors import DeliveredInPart, NotDelivered
from windlass.notify.message_content import to_sentences
from windlass.notify.thread_runner import SingleThreadRunner

# Limits for each step, and for the whole delivery.
TIMEOUT_S = 20.0
DEADLINE_S = 50.0
_PORTS = {"smtp": 587, "smtps": 465}


class EmailNotifier:
    """`url`: smtp://user:password@host:587, or smtps:// for TLS from the first byte.

    With smtp:// the connection is encrypted if the server offers it, and always if there is a password.
    """

    name = "email"

    def __init__(self, url: str, sender: str, recipients: tuple[str, ...]) -> None:
        parts = urlsplit(url)
        self._is_encrypted = parts.scheme == "smtps"
        self._host = parts.hostname or "localhost"
        self._port = parts.port or _PORTS[parts.scheme]
        self._user = unquote(parts.username) if parts.username else None
        self._password = unquote(parts.password or "")
        self._sender = sender
        self._recipients = recipients
        self._thread = SingleThreadRunner(self.name)

    async def send(self, message: Message) -> None:
        letter = self._letter(message)
        try:
            refused = await self._thread.call(lambda: self._send(letter), DEADLINE_S)
        except (smtplib.SMTPException, OSError, ssl.SSLError) as error:
            # The server's text may repeat our credentials.
            raise NotDelivered(f"mail server {self._host} did not accept it ({type(error).__name__})") from None
        if refused:
            recipients = ", ".join(f"{recipient} ({code})" for recipient, (code, _) in refused.items())
            raise DeliveredInPart(f"mail server {self._host} refused {recipients}", len(refused))

    def _letter(self, message: Message) -> EmailMessage:
        letter = EmailMessage()
        letter["From"] = self._sender
        letter["To"] = ", ".join(self._recipients)
        letter["Subject"] = " ".join(f"windlass {message.title}".split())
        letter["Date"] = datetime.now(UTC)
        letter["Message-ID"] = self._message_id(message, message.kind)
        if message.kind is MessageKind.RESOLVED:
            # Mail clients show both messages of an alert in one thread.
            letter["In-Reply-To"] = letter["References"] = self._message_id(message, MessageKind.FIRING)
        letter.set_content(to_sentences(message))
        return letter

    def _message_id(self, message: Message, kind: MessageKind) -> str:
        """The same for a repeated delivery."""
        return f"<windlass-{message.alert_id}-{kind}-{message.since:%Y%m%d%H%M%S}@{self._host}>"

    def _send(self, letter: EmailMessage) -> Mapping[str, tuple[int, bytes]]:
        """Returns the refused recipients, if others were accepted."""
        context = ssl.create_default_context()
        if self._is_encrypted:
            server: smtplib.SMTP = smtplib.SMTP_SSL(self._host, self._port, timeout=TIMEOUT_S, context=context)
        else:
            server = smtplib.SMTP(self._host, self._port, timeout=TIMEOUT_S)
        with server:
            server.ehlo()
            if not self._is_encrypted and (server.has_extn("starttls") or self._user is not None):
                server.starttls(context=context)
            if self._user is not None:
                server.login(self._user, self._password)
            return server.send_message(letter)
