"""Sends messages by HTTP: as JSON for programs, or as text for Slack and compatible chats.

Only the status of the response is read, and DEADLINE_S covers the whole delivery. A receiver that sends a byte now and
then counts as one that does not answer, and so does a name lookup that hangs: it cannot be interrupted, but the caller
does not wait for it.
"""

import asyncio

import httpx

from windlass.model.alert import Message
from windlass.model.errors import NotDelivered
from windlass.notify.message_content import to_plain, to_sentences
from windlass.notify.thread_runner import SingleThreadRunner

# Limits for each step, and for the whole delivery.
TIMEOUT_S = 10.0
DEADLINE_S = 20.0


class WebhookNotifier:
    name = "webhook"

    def __init__(self, url: str) -> None:
        self._url = url
        self._thread = SingleThreadRunner(self.name)

    async def send(self, message: Message) -> None:
        headers = {"User-Agent": "windlass", "X-Message-Id": str(message.id)}
        body = self._body(message)
        # The URL may hold a secret, so errors do not repeat it.
        try:
            status = await self._thread.call(lambda: asyncio.run(self._post(body, headers)), DEADLINE_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotDelivered(f"{self.name} is unreachable ({type(error).__name__})") from None
        except TimeoutError:
            raise NotDelivered(f"{self.name} did not answer within {DEADLINE_S:g} s") from None
        if not httpx.codes.is_success(status):
            raise NotDelivered(f"{self.name} answered {status}")

    async def _post(self, body: dict[str, object], headers: dict[str, str]) -> int:
        async with (
            asyncio.timeout(DEADLINE_S),
            httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False) as client,
            client.stream("POST", self._url, json=body, headers=headers) as answer,
        ):
            return answer.status_code

    def _body(self, message: Message) -> dict[str, object]:
        return to_plain(message)


class SlackNotifier(WebhookNotifier):
    name = "slack"

    def _body(self, message: Message) -> dict[str, object]:
        # Slack treats &, < and > as markup.
        text = f"*{message.title}*\n{to_sentences(message)}"
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
