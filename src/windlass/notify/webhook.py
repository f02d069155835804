"""Messages by HTTP: as JSON for programs, or as Slack and what speaks like it wants them.

Of an answer only its status is read, and all of it has one time limit: a receiver that sends a byte now and then, for
ever, is as good as one that does not answer, and keeps the next message no longer than that. So is one whose name is
being looked up for ever: that cannot be broken off, but nobody waits for it any longer.
"""

import asyncio

import httpx

from windlass.model.alert import Message
from windlass.model.errors import NotDelivered
from windlass.notify.format import to_plain, to_sentences
from windlass.notify.thread_runner import SingleThreadRunner

# For each step of it, and for all of it.
TIMEOUT_S = 10.0
DEADLINE_S = 20.0


class Webhook:
    name = "webhook"

    def __init__(self, url: str) -> None:
        self._url = url
        self._aside = SingleThreadRunner(self.name)

    async def send(self, message: Message) -> None:
        headers = {"User-Agent": "windlass", "X-Message-Id": str(message.id)}
        body = self._body(message)
        # The address may hold a secret: no error repeats it.
        try:
            status = await self._aside.call(lambda: asyncio.run(self._post(body, headers)), DEADLINE_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NotDelivered(f"the {self.name} cannot be reached ({type(error).__name__})") from None
        except TimeoutError:
            raise NotDelivered(f"the {self.name} did not answer within {DEADLINE_S:g} s") from None
        if not httpx.codes.is_success(status):
            raise NotDelivered(f"the {self.name} answered {status}")

    async def _post(self, body: dict[str, object], headers: dict[str, str]) -> int:
        async with (
            asyncio.timeout(DEADLINE_S),
            httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False) as client,
            client.stream("POST", self._url, json=body, headers=headers) as answer,
        ):
            return answer.status_code

    def _body(self, message: Message) -> dict[str, object]:
        return to_plain(message)


class Slack(Webhook):
    name = "slack"

    def _body(self, message: Message) -> dict[str, object]:
        # Slack reads &, < and > as its own.
        text = f"*{message.title}*\n{to_sentences(message)}"
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
