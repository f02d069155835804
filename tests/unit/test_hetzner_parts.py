"""Pure parts of the Hetzner provider: error kinds, names, labels, prices and the rate limiter."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import requests
from hcloud import APIException

from support.simulator.loop import run
from windlass.model.errors import Refused, Throttled
from windlass.model.hetzner import Choice
from windlass.model.machine import MachineRequest
from windlass.providers.fingerprint import fingerprint
from windlass.providers.hetzner import naming
from windlass.providers.hetzner.catalog import order_choices, read_prices
from windlass.providers.hetzner.errors import to_vendor_error
from windlass.providers.hetzner.limiter import BURST, RATE_PER_S, HetznerLimiter
from windlass.providers.rate_limiter import FIRST_PAUSE_S, MAX_PAUSE_S
from windlass.providers.runpod.limiter import RunpodLimiter
from windlass.providers.vendor_error import ErrorKind

# ---------------------------------------------------------------------------------------------------------- problems


def api_error(code: str | int) -> APIException:
    return APIException(code, "the vendor's message", None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (api_error("resource_unavailable"), ErrorKind.NO_CAPACITY),
        (api_error("placement_error"), ErrorKind.NO_CAPACITY),
        (api_error("maintenance"), ErrorKind.NO_CAPACITY),
        (api_error("resource_limit_exceeded"), ErrorKind.LIMIT),
        (api_error("unauthorized"), ErrorKind.DENIED),
        (api_error("token_readonly"), ErrorKind.DENIED),
        (api_error("forbidden"), ErrorKind.DENIED),
        (api_error("uniqueness_error"), ErrorKind.NAME_IN_USE),
        (api_error("not_found"), ErrorKind.NOT_FOUND),
        (api_error("locked"), ErrorKind.BUSY),
        (api_error("conflict"), ErrorKind.BUSY),
        (api_error("protected"), ErrorKind.PROTECTED),
        (api_error("rate_limit_exceeded"), ErrorKind.THROTTLED),
        (api_error("invalid_input"), ErrorKind.REFUSED),
        (api_error("json_error"), ErrorKind.REFUSED),
        (api_error("server_error"), ErrorKind.LOST),
        (api_error("unavailable"), ErrorKind.LOST),
        (api_error("timeout"), ErrorKind.LOST),
        (api_error("bad_gateway"), ErrorKind.LOST),
        (api_error("service_error"), ErrorKind.LOST),
        (api_error("an_unknown_code"), ErrorKind.LOST),
        (api_error(401), ErrorKind.DENIED),
        (api_error(404), ErrorKind.NOT_FOUND),
        (api_error(400), ErrorKind.REFUSED),
        (api_error(408), ErrorKind.LOST),
        (api_error(429), ErrorKind.THROTTLED),
        (api_error(502), ErrorKind.LOST),
        (api_error(200), ErrorKind.LOST),
        (requests.exceptions.ReadTimeout("read"), ErrorKind.LOST),
        (requests.exceptions.ConnectTimeout("connect"), ErrorKind.LOST),
        (requests.exceptions.ConnectionError("refused"), ErrorKind.LOST),
        (requests.exceptions.ChunkedEncodingError("broken"), ErrorKind.LOST),
        (TimeoutError(), ErrorKind.LOST),
        (KeyError("server"), ErrorKind.LOST),
    ],
    ids=lambda value: str(value.code) if isinstance(value, APIException) else str(value),
)
def test_each_failure_maps_to_one_error_kind(error: Exception, kind: ErrorKind) -> None:
    found = to_vendor_error(error)
    assert found.kind is kind
    assert str(found)
    if isinstance(error, APIException):
        assert str(found) == f"the vendor's message ({error.code})"


# ------------------------------------------------------------------------------------------------------------ naming


def request_for(name: str) -> MachineRequest:
    return MachineRequest(name, "fleet", 3)


@pytest.mark.parametrize(
    ("worker_id", "is_fine"),
    [
        ("renders-0-0123456789", True),
        ("a" * 40 + "-9999-0123456789", True),
        ("a_b-0-0123456789", False),
        ("-0-0123456789", False),
        ("Renders-0-0123456789", False),
        ("a" * 57, False),
    ],
)
def test_server_name_is_a_host_name_or_refused(worker_id: str, is_fine: bool) -> None:
    if is_fine:
        assert naming.server_name(worker_id, "abcdef0123456789") == f"{worker_id}-abcdef"
        assert len(naming.server_name(worker_id, "abcdef0123456789")) <= 63
    else:
        with pytest.raises(
            Refused, match=rf"creating server {worker_id}: '{worker_id}-abcdef' is not a valid server name"
        ):
            naming.server_name(worker_id, "abcdef0123456789")


@pytest.mark.parametrize("fleet", ["renders", "Renders", "a.b_c", "a:b", "a-b", "ends-with-", "x" * 63, "x" * 62 + ":"])
def test_every_fleet_name_becomes_a_valid_label(fleet: str) -> None:
    labels = naming.server_labels(naming.fleet_labels("0" * 16, fleet), request_for("w-0-1"), {"team": "a"})
    assert set(labels) == {"team", "managed-by", "windlass-id", "windlass-fleet", "windlass-worker", "windlass-slot"}
    assert all(len(value) <= 63 for value in labels.values())
    assert labels["windlass-slot"] == "3"


def test_fleets_have_distinct_labels() -> None:
    names = ["a:b", "a-b", "a_b", "a.b", "A:b", "a:b-", "a:c"]
    assert len({naming.fleet_label(name) for name in names}) == len(names)


def test_invalid_label_is_refused_before_the_request() -> None:
    with pytest.raises(Refused, match="creating server w:0: 'w:0' is not a valid value of label windlass-worker"):
        naming.server_labels(naming.fleet_labels("0" * 16, "f"), request_for("w:0"), {})


def test_user_data_over_32_kib_is_refused_before_the_request() -> None:
    assert naming.check_user_data("w", "x" * 32_768)
    with pytest.raises(Refused, match="creating server w: user_data has 32,770 bytes, at most 32,768 are allowed"):
        naming.check_user_data("w", "ä" * 16_385)


def test_fingerprint_distinguishes_databases_and_reveals_nothing() -> None:
    one, other = fingerprint("db.example.com/app"), fingerprint("db.example.com/other")
    assert one != other
    assert len(one) == 16
    assert "example" not in one


# ----------------------------------------------------------------------------------------------------------- catalog


def money(net: str, gross: str = "9") -> dict[str, str]:
    return {"net": net, "gross": gross}


PRICING: dict[str, Any] = {
    "currency": "EUR",
    "primary_ips": [
        {
            "type": "ipv4",
            "prices": [{"location": "nbg1", "price_hourly": money("0.0008"), "price_monthly": money("0.5")}],
        },
        {"type": "ipv6", "prices": [{"location": "nbg1", "price_hourly": money("0"), "price_monthly": money("0")}]},
    ],
    "server_types": [
        {
            "name": "cx23",
            "prices": [
                {
                    "location": "nbg1",
                    "price_hourly": money("0.0056000000000000"),
                    "price_monthly": money("3.4900000000"),
                },
                {"location": "fsn1", "price_hourly": money("0.00000049"), "price_monthly": money("0.0000005")},
            ],
        }
    ],
}


def test_prices_are_integer_micros_with_optional_address() -> None:
    prices = read_prices(PRICING, "net")
    nuremberg = Choice("cx23", "nbg1")
    assert prices.currency == "EUR"
    assert prices.price_parts(nuremberg, has_ipv4=False) == ((5_600, 3_490_000),)
    assert prices.price_parts(nuremberg, has_ipv4=True) == ((5_600, 3_490_000), (800, 500_000))
    assert read_prices(PRICING, "gross").price_parts(nuremberg, has_ipv4=False) == ((9_000_000, 9_000_000),)


def test_incomplete_price_is_unknown() -> None:
    prices = read_prices(PRICING, "net")
    assert prices.price_parts(Choice("cx23", "fsn1"), has_ipv4=True) == ()
    assert prices.price_parts(Choice("cx23", "fsn1"), has_ipv4=False) == ((0, 1),)  # half a micro rounds up
    assert prices.price_parts(Choice("cx99", "nbg1"), has_ipv4=False) == ()


def test_choices_keep_their_order_with_out_of_stock_last() -> None:
    a, b, c, d = (Choice("cx23", place) for place in "abcd")
    assert order_choices([a, b, c, d], {b}, {a}) == [c, d, a]
    assert order_choices([a, b], {a, b}, set()) == []
    assert order_choices([a, b], set(), {a, b}) == [a, b]


# ----------------------------------------------------------------------------------------------------------- limiter


def test_burst_is_sent_at_once_then_at_the_rate() -> None:
    async def times() -> list[float]:
        limiter, loop = HetznerLimiter(), asyncio.get_running_loop()
        found = []
        for _ in range(BURST + 5):
            await limiter.wait(60)
            found.append(loop.time())
        return found

    found = run(times())
    assert found[BURST - 1] == 0
    assert found[BURST:] == pytest.approx([n / RATE_PER_S for n in range(1, 6)])


def test_requests_wait_in_order_of_arrival() -> None:
    async def order() -> list[int]:
        limiter, went = HetznerLimiter(rate_per_s=1, burst=1), []

        async def go(number: int) -> None:
            await limiter.wait(60)
            went.append(number)

        await asyncio.gather(*(go(number) for number in range(5)))
        return went

    assert run(order()) == [0, 1, 2, 3, 4]


def test_request_that_would_wait_too_long_fails_at_once() -> None:
    async def scenario() -> None:
        limiter = HetznerLimiter(rate_per_s=1, burst=1)
        await limiter.wait(0)
        for _ in range(3):
            with pytest.raises(Throttled) as caught:
                await limiter.wait(0.5)
            assert caught.value.retry_after_s == pytest.approx(1.0)
        await limiter.wait(1.0)

    run(scenario())


def test_cancelled_request_returns_its_turn() -> None:
    async def cancel() -> float:
        limiter, loop = HetznerLimiter(rate_per_s=1, burst=1), asyncio.get_running_loop()
        await limiter.wait(0)
        waiting = asyncio.create_task(limiter.wait(60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await limiter.wait(60)
        return loop.time()

    assert run(cancel()) == pytest.approx(1.0)


def test_each_429_doubles_the_pause() -> None:
    async def pauses() -> list[float]:
        limiter, found = HetznerLimiter(), []
        for _ in range(8):
            limiter.record_response(429, {})
            found.append(limiter.pause_s)
            assert limiter.spare_requests() == 0
            await asyncio.sleep(limiter.pause_s)
        limiter.record_response(200, {})
        limiter.record_response(429, {})
        return [*found, limiter.pause_s]

    assert run(pauses()) == [10, 20, 40, 80, 160, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S, 10]


@pytest.mark.parametrize("limiter", [HetznerLimiter, RunpodLimiter])
def test_burst_of_429_responses_pauses_waiting_requests_once(
    limiter: Callable[[], HetznerLimiter | RunpodLimiter],
) -> None:
    async def storm() -> tuple[list[float], int, float]:
        shared, loop, sent = limiter(), asyncio.get_running_loop(), []

        async def ask() -> None:
            await shared.wait(25.0)
            sent.append(loop.time())
            await asyncio.sleep(0.1)
            shared.record_response(429, {})

        asking = [asyncio.create_task(ask()) for _ in range(40)]
        await asyncio.sleep(5.0)
        pause_s = shared.pause_s + 5.0
        results = await asyncio.gather(*asking, return_exceptions=True)
        return sent, sum(isinstance(each, Throttled) for each in results), pause_s

    sent, throttled, pause_s = run(storm())
    assert [at for at in sent if 0.2 < at < FIRST_PAUSE_S] == []
    assert pause_s == pytest.approx(FIRST_PAUSE_S + 0.1)
    # A request that would wait too long now is throttled, and was not sent.
    assert throttled > 0
    assert len(sent) + throttled == 40


def test_longer_retry_after_extends_the_pause() -> None:
    async def pause() -> float:
        limiter = HetznerLimiter()
        limiter.record_response(429, {})
        limiter.record_response(429, {"Retry-After": "33"})
        limiter.record_response(200, {})  # answers a request sent before the pause
        await asyncio.sleep(33)
        limiter.record_response(429, {})
        return limiter.pause_s

    assert run(pause()) == 2 * FIRST_PAUSE_S


def test_urgent_requests_go_before_creations() -> None:
    async def order() -> list[str]:
        limiter, went = HetznerLimiter(rate_per_s=1, burst=1), []

        async def go(name: str, *, is_urgent: bool) -> None:
            await limiter.wait(60, is_urgent=is_urgent)
            went.append(name)

        launches = [asyncio.create_task(go(f"creation {n}", is_urgent=False)) for n in range(3)]
        await asyncio.sleep(0.5)
        deletions = [asyncio.create_task(go(f"deletion {n}", is_urgent=True)) for n in range(2)]
        await asyncio.gather(*launches, *deletions)
        return went

    assert run(order()) == ["creation 0", "deletion 0", "deletion 1", "creation 1", "creation 2"]


def test_retry_after_sets_the_pause() -> None:
    async def pause() -> float:
        limiter = HetznerLimiter()
        limiter.record_response(429, {"Retry-After": "33"})
        return limiter.pause_s

    assert run(pause()) == 33


def test_urgent_requests_resume_before_a_long_pause_ends() -> None:
    async def pause() -> tuple[float, float]:
        limiter, loop = HetznerLimiter(), asyncio.get_running_loop()
        limiter.record_response(429, {"Retry-After": "3600"})
        asked_s = limiter.pause_s
        await limiter.wait(3600, is_urgent=True)
        return asked_s, loop.time()

    assert run(pause()) == (3600, MAX_PAUSE_S)


def test_rate_is_halved_when_few_requests_remain() -> None:
    async def waited(headers: dict[str, str]) -> float:
        limiter, loop = HetznerLimiter(), asyncio.get_running_loop()
        limiter.record_response(200, headers)
        for _ in range(BURST):
            await limiter.wait(600)
        return loop.time()

    assert run(waited({"RateLimit-Limit": "3600", "RateLimit-Remaining": "3000"})) == 0
    halved_s = (BURST - 1) / (RATE_PER_S / 2)
    assert run(waited({"RateLimit-Limit": "3600", "RateLimit-Remaining": "10"})) == pytest.approx(halved_s)
    assert run(waited({"RateLimit-Limit": "what", "RateLimit-Remaining": "-"})) == 0


def test_spare_requests_leave_half_of_the_burst() -> None:
    async def spare() -> list[int]:
        limiter = HetznerLimiter()
        found = [limiter.spare_requests()]
        for _ in range(BURST):
            await limiter.wait(0)
        return [*found, limiter.spare_requests()]

    assert run(spare()) == [BURST // 2, 0]
