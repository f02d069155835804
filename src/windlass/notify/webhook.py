"""Messages by HTTP: as JSON for programs, or as Slack and what speaks like it wants them."""

import httpx

from windlass.model.alert import Message
from windlass.notify.aside import Aside
from windlass.notify.plain import to_plain, to_sentences
from windlass.ports.alarm import NotDelivered

TIMEOUT_S = 10.0


class Webhook:
    name = "webhook"

    def __init__(self, url: str) -> None:
        self._url = url
        self._aside = Aside(self.name)

    async def send(self, message: Message) -> None:
        headers = {"User-Agent": "windlass", "X-Message-Id": str(message.id)}
        body = self._body(message)
        # The address may hold a secret: no error repeats it.
        try:
            answer = await self._aside.call(
                lambda: httpx.post(self._url, json=body, headers=headers, timeout=TIMEOUT_S, follow_redirects=False)
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
