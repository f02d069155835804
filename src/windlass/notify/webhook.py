"""Messages by HTTP: as JSON for programs, or as Slack and what speaks like it wants them."""

import httpx

from windlass.model.alert import Message
from windlass.notify.plain import to_plain, to_sentences
from windlass.ports.alarm import NotDelivered

TIMEOUT_S = 10.0


class Webhook:
    """`transport`, if given, carries the requests instead of the network."""

    name = "webhook"

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        self._transport = transport

    async def send(self, message: Message) -> None:
        # The address may hold a secret: no error repeats it.
        try:
            async with httpx.AsyncClient(
                timeout=TIMEOUT_S, transport=self._transport, follow_redirects=False
            ) as client:
                answer = await client.post(
                    self._url,
                    json=self._body(message),
                    headers={"User-Agent": "windlass", "X-Message-Id": str(message.id)},
                )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotDelivered(f"the {self.name} cannot be reached ({type(error).__name__})") from None
        if not answer.is_success:
            raise NotDelivered(f"the {self.name} answered {answer.status_code}")

    def _body(self, message: Message) -> dict[str, object]:
        return to_plain(message)


class Slack(Webhook):
    name = "slack"

    def _body(self, message: Message) -> dict[str, object]:
        # Slack reads &, < and > as its own.
        text = f"*{message.title}*\n{to_sentences(message)}"
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
