"""Messages by e-mail, with the standard library's SMTP in a thread: a few a day need no library of their own."""

import smtplib
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit

from windlass.model.alert import Message, MessageKind
from windlass.model.errors import DeliveredInPart, NotDelivered
from windlass.notify.format import to_sentences
from windlass.notify.thread_runner import SingleThreadRunner

# For each step of it, and for all of it.
TIMEOUT_S = 20.0
DEADLINE_S = 50.0
_PORTS = {"smtp": 587, "smtps": 465}


class Email:
    """`url`: smtp://user:password@host:587 (encrypted if the server offers it, and always with a password), smtps://
    from the first byte on."""

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
        self._aside = SingleThreadRunner(self.name)

    async def send(self, message: Message) -> None:
        letter = self._letter(message)
        try:
            refused = await self._aside.call(lambda: self._send(letter), DEADLINE_S)
        except (smtplib.SMTPException, OSError, ssl.SSLError) as error:
            # What the server says may repeat what we said.
            raise NotDelivered(f"the mail server at {self._host} did not take it ({type(error).__name__})") from None
        if refused:
            whom = ", ".join(f"{recipient} ({code})" for recipient, (code, _) in refused.items())
            raise DeliveredInPart(f"the mail server at {self._host} refused {whom}", len(refused))

    def _letter(self, message: Message) -> EmailMessage:
        letter = EmailMessage()
        letter["From"] = self._sender
        letter["To"] = ", ".join(self._recipients)
        letter["Subject"] = " ".join(f"windlass {message.title}".split())
        letter["Date"] = datetime.now(UTC)
        letter["Message-ID"] = self._message_id(message, message.kind)
        if message.kind is MessageKind.RESOLVED:
            # One thread for an alert's beginning and end.
            letter["In-Reply-To"] = letter["References"] = self._message_id(message, MessageKind.FIRING)
        letter.set_content(to_sentences(message))
        return letter

    def _message_id(self, message: Message, kind: MessageKind) -> str:
        """The same when it comes twice."""
        return f"<windlass-{message.alert_id}-{kind}-{message.since:%Y%m%d%H%M%S}@{self._host}>"

    def _send(self, letter: EmailMessage) -> Mapping[str, tuple[int, bytes]]:
        """Who of the recipients was refused, if others were not."""
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
